"""Step time of pre-activation networks: fused with few bits, beside torch's own modules and the exact fused layers.

Forward, backward and nothing else, of the same weights and batch. The three take turns, so that a machine whose speed
drifts slows all alike; ratios are medians over rounds of the ratio within a round.
"""

import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .layers.preact import PreActConv2d
from .models import preact_resnet
from .models.preact_resnet import Unfused

BARS = {"cpu": 1.10, "cuda": 1.05}  # times the step time of torch's modules, at 4 bits


@dataclass(frozen=True)
class Case:
    """What is timed on images of size×size: a network of `depth`, or where that is None four convolutions in a row.

    Attributes:
        depth: of a network with the stem cifar.
        width: of the network, or channels of the convolutions.
        kernel: of the convolutions.
    """

    name: str
    depth: int | None
    width: int
    batch: int
    size: int
    kernel: int = 3

    def model(self, bits: int | None, fused: bool, device: str = "cpu") -> nn.Module:
        """Return the model with weights of its own."""
        return self._model(bits, fused).to(device)

    def _model(self, bits: int | None, fused: bool) -> nn.Module:
        if self.depth is not None:
            return preact_resnet(self.depth, width=self.width, bits=bits, fused=fused)
        how = {"padding": self.kernel // 2, "bits": bits}
        layers = (PreActConv2d(self.width, self.width, self.kernel, **how) for _ in range(4))
        return nn.Sequential(*(layer if fused else Unfused(layer) for layer in layers))

    def input(self, device: str = "cpu") -> torch.Tensor:
        """Return a batch."""
        shape = (self.batch, 3 if self.depth else self.width, self.size, self.size)
        return torch.randn(shape, device=device, requires_grad=True)


CPU_CASES = (
    Case("4 conv 3x3", None, 64, 32, 32),
    Case("4 conv 1x1", None, 64, 32, 32, kernel=1),
    Case("29 layers", 29, 16, 32, 32),
    Case("164 layers, width 8", 164, 8, 64, 8),
)
# As in the paper: images of CIFAR's size, and batches that fit for exact training too.
GPU_CASES = (
    Case("4 conv 3x3", None, 64, 1024, 32),
    Case("4 conv 1x1", None, 256, 1024, 32, kernel=1),
    Case("164 layers", 164, 16, 128, 32),
    Case("1001 layers", 1001, 16, 64, 32),
)
CASES = {"cpu": CPU_CASES, "cuda": GPU_CASES}


@dataclass(frozen=True)
class StepTime:
    """Median times of a step.

    Attributes:
        case: its name.
        bits: of the activations.
        fewbit_ms, exact_ms, torch_ms: fused with few bits, fused and exact, and torch's modules.
        ratio, ratio_to_exact: of the first to the last and to the second.
        bar: what `ratio` shall not exceed.
    """

    case: str
    bits: int
    fewbit_ms: float
    exact_ms: float
    torch_ms: float
    ratio: float
    ratio_to_exact: float
    bar: float

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.ratio <= self.bar

    def to_dict(self) -> dict[str, object]:
        """Return the fields and whether the bar is met as JSON values."""
        return {**asdict(self), "met": self.met}


def bench_preact(case: Case, bits: int = 4, rounds: int = 15, device: str = "cpu") -> StepTime:
    """Time one case on the CPU or on the current GPU; one round first, to warm up, is not counted."""
    models = [case.model(b, fused, device) for b, fused in ((bits, True), (None, True), (bits, False))]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = case.input(device)
    seconds = [[_step(model, x) for model in models] for _ in range(rounds + 1)][1:]
    few, exact, plain = (1000 * statistics.median(times) for times in zip(*seconds, strict=True))
    ratio = statistics.median(times[0] / times[2] for times in seconds)
    ratio_to_exact = statistics.median(times[0] / times[1] for times in seconds)
    return StepTime(case.name, bits, few, exact, plain, ratio, ratio_to_exact, BARS[device])


def _step(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    out = model(x)
    out.sum().backward()
    model.zero_grad()
    x.grad = None
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
