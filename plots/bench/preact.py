"""`fewbit bench preact`: step time of few-bit pre-activation networks, beside torch's modules and exact fused layers.

Forward and backward only, with the same weights and batch. Ratios are medians over rounds of the ratio within a round.
"""

from dataclasses import asdict, dataclass
from functools import partial

import click
import torch
from torch import nn

from ...cli.progress import with_progress
from ...runtime.layers.preact import PreActConv2d
from ...runtime.models import preact_resnet
from ...runtime.models.preact_resnet import Unfused
from ...tables.columns import columns
from ...tables.table import check_bits
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import clock_of, take_turns

BARS = {"cpu": 1.10, "cuda": 1.05}  # relative to the step time of torch's modules, at 4 bits


@dataclass(frozen=True)
class Case:
    """A model on images of size×size: a network of `depth`, or four convolutions in a row if that is None.

    Attributes:
        depth: of a network with the CIFAR stem.
        width: of the network, or number of channels of the convolutions.
        kernel: kernel size of the convolutions.
    """

    name: str
    depth: int | None
    width: int
    batch: int
    size: int
    kernel: int = 3

    def model(self, bits: int | None, fused: bool, device: str = "cpu") -> nn.Module:
        """Return the model with newly drawn weights."""
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
# As in the paper: images of CIFAR's size, and batches that also fit for exact training.
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
        fewbit_ms, exact_ms, torch_ms: fused with few bits, fused and exact, torch's modules.
        ratio, ratio_to_exact: the first relative to the last and to the second.
        bar: upper limit of `ratio`.
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


@bench_command("preact", threads=True, device=True)
@click.option("--bits", type=int, default=4, show_default=True, metavar="N", help="Bits per element, 1 to 8.")
@rounds_option()
def command(bits: int, device: str, rounds: int) -> Report:
    """Time pre-activation layers and networks (BLPA) beside torch's modules.

    Times forward and backward on the CPU or a GPU, in turn: fused layers with few bits, torch's own modules, and fused
    layers that save one exact activation and recompute the others. Prints medians in milliseconds, and medians of the
    ratios of each round.

    Example: fewbit bench preact --bits 4 --threads 2
    """
    check_bits(bits)
    cases = CASES[device]
    rows = [bench_preact(case, bits, rounds, device) for case in with_progress(cases, len(cases), "measuring")]
    here = this_machine(device)
    values = {
        "torch": here.torch,
        "threads": here.threads,
        "device": here.where,
        "steps": [row.to_dict() for row in rows],
    }
    head = ("what", "bits", "fewbit ms", "exact ms", "torch ms", "of torch", "of exact", "bar", "met")
    body = [
        (
            *(row.case, str(row.bits), *(f"{ms:.1f}" for ms in (row.fewbit_ms, row.exact_ms, row.torch_ms))),
            *(f"{row.ratio:.2f}", f"{row.ratio_to_exact:.2f}", f"{row.bar:.2f}", MET[row.met]),
        )
        for row in rows
    ]
    return Report(values, [f"torch {here.torch}, {here.where}", *columns([head, *body], left=1)])


def bench_preact(case: Case, bits: int = 4, rounds: int = 15, device: str = "cpu") -> StepTime:
    """Time one case on the CPU or on the current GPU, after one warm-up round."""
    few, *others = (case.model(b, fused, device) for b, fused in ((bits, True), (None, True), (bits, False)))
    for model in others:
        model.load_state_dict(few.state_dict())
    x = case.input(device)
    models = dict(zip(("fewbit", "exact", "torch"), (few, *others), strict=True))
    runs = {who: partial(_step, model, x) for who, model in models.items()}
    times = take_turns(runs, rounds, clock=clock_of(device), warm_up=1)
    return StepTime(
        case.name,
        bits,
        fewbit_ms=1000 * times.median("fewbit"),
        exact_ms=1000 * times.median("exact"),
        torch_ms=1000 * times.median("torch"),
        ratio=times.ratio("fewbit", to="torch"),
        ratio_to_exact=times.ratio("fewbit", to="exact"),
        bar=BARS[device],
    )


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()
    x.grad = None
