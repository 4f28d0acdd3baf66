"""Step time of pre-activation networks: fused with few bits, beside torch's own modules and the exact fused layers.

Forward, backward and nothing else, of the same weights and batch. The three take turns, so that a machine whose speed
drifts slows all alike; ratios are medians over rounds of the ratio within a round.
"""

import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .models import preact_resnet
from .models.preact_resnet import Unfused
from .preact import PreActConv2d

BAR = 1.10  # times the step time of torch's modules, at 4 bits


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

    def model(self, bits: int | None, fused: bool) -> nn.Module:
        """Return the model with weights of its own."""
        if self.depth is not None:
            return preact_resnet(self.depth, width=self.width, bits=bits, fused=fused)
        how = {"padding": self.kernel // 2, "bits": bits}
        layers = (PreActConv2d(self.width, self.width, self.kernel, **how) for _ in range(4))
        return nn.Sequential(*(layer if fused else Unfused(layer) for layer in layers))

    def input(self) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(self.batch, 3 if self.depth else self.width, self.size, self.size, requires_grad=True)


CASES = (
    Case("4 conv 3x3", None, 64, 32, 32),
    Case("4 conv 1x1", None, 64, 32, 32, kernel=1),
    Case("29 layers", 29, 16, 32, 32),
    Case("164 layers, width 8", 164, 8, 64, 8),
)


@dataclass(frozen=True)
class StepTime:
    """Median times of a step.

    Attributes:
        case: its name.
        bits: of the activations.
        fewbit_ms, exact_ms, torch_ms: fused with few bits, fused and exact, and torch's modules.
        ratio, ratio_to_exact: of the first to the last and to the second.
    """

    case: str
    bits: int
    fewbit_ms: float
    exact_ms: float
    torch_ms: float
    ratio: float
    ratio_to_exact: float

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.ratio <= BAR

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": BAR, "met": self.met}


def bench_preact(case: Case, bits: int = 4, rounds: int = 15) -> StepTime:
    """Time one case; one round first, to warm up, is not counted."""
    models = [case.model(b, fused) for b, fused in ((bits, True), (None, True), (bits, False))]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = case.input()
    seconds = [[_step(model, x) for model in models] for _ in range(rounds + 1)][1:]
    few, exact, plain = (1000 * statistics.median(times) for times in zip(*seconds, strict=True))
    ratio = statistics.median(times[0] / times[2] for times in seconds)
    ratio_to_exact = statistics.median(times[0] / times[1] for times in seconds)
    return StepTime(case.name, bits, few, exact, plain, ratio, ratio_to_exact)


def _step(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    out = model(x)
    out.sum().backward()
    model.zero_grad()
    x.grad = None
    return time.perf_counter() - start
