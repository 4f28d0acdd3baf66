"""`fewbit bench outliers`: V-Quant's quantizer beside `PerGroup`, and its training steps beside torch's.

For quantizers the best round counts, as in quantizers.py; for steps, the median over rounds of the ratio within a
round. Torch's model takes part twice in each step, the second time as `again`: the difference between two equal models
is noise. Beside wall time stands process time, which other work on the machine disturbs less (with several threads it
includes the time that threads wait for each other), and page faults: memory that the allocator returned to the system
and has to request again, which is torch's own time and varies at random. On a GPU a step ends when the GPU is idle.
"""

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import click
import torch
from torch import nn
from torch.nn import functional as F

from ...cli.progress import with_progress
from ...runtime.inference.vquant import value_aware
from ...runtime.quantizers import Outlier, PerGroup, Quantizer
from ...tables.columns import columns
from ..studies.networks import conv, resnet
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import Run, Times, gpu_events, processor, readings, take_turns

PAIR_BAR = 2.5  # times PerGroup at 4 bits, compress plus decompress
STEP_BAR = 1.10  # times torch's step
SIZES = (1 << 20, 1 << 22, 1 << 24)
_SAMPLES = 64


@dataclass(frozen=True)
class PairTime:
    """Milliseconds of compress plus decompress, best of the rounds.

    Attributes:
        n: number of elements, float32.
        outlier_ms, relu_ms, per_group_ms: V-Quant, RV-Quant of a ReLU's output, PerGroup at 4 bits.
        ratio, relu_ratio: the first two relative to the third.
        median_ratio, relu_median_ratio: the same for medians.
    """

    n: int
    outlier_ms: float
    relu_ms: float
    per_group_ms: float
    ratio: float
    relu_ratio: float
    median_ratio: float
    relu_median_ratio: float

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return max(self.ratio, self.relu_ratio) <= PAIR_BAR

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": PAIR_BAR, "met": self.met}


@dataclass(frozen=True)
class Case:
    """A network on a batch of square images.

    Attributes:
        build: returns the network with newly drawn weights.
        classes: number of classes.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: int
    size: int
    classes: int


@dataclass(frozen=True)
class StepTime:
    """Median times of a training step, forward and backward.

    Attributes:
        case: name of the network.
        batch, size: number of images, and pixels per side.
        bits, outliers: settings of V-Quant.
        fewbit_ms, torch_ms: wall time.
        ratio, again_ratio: V-Quant, and a second copy of torch's model, relative to torch.
        cpu_ratio, again_cpu_ratio: the same for process time.
        fewbit_faults, torch_faults: page faults of a step; None if the system does not count them.
    """

    case: str
    batch: int
    size: int
    bits: int
    outliers: float
    fewbit_ms: float
    torch_ms: float
    ratio: float
    again_ratio: float
    cpu_ratio: float
    again_cpu_ratio: float
    fewbit_faults: int | None
    torch_faults: int | None

    @property
    def met(self) -> bool:
        """Whether the wall-time ratio is within the bar."""
        return self.ratio <= STEP_BAR

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": STEP_BAR, "met": self.met}


def six_convolutions() -> nn.Module:
    """Return six convolutions of 64 to 256 channels with batch normalization and ReLU, in the style of VGG."""
    first, second, third = ((*conv(a, b), *conv(b, b)) for a, b in ((3, 64), (64, 128), (128, 256)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(*first, nn.MaxPool2d(2), *second, nn.MaxPool2d(2), *third, *head)


def small_resnet18() -> nn.Module:
    """Return ResNet-18 for images of 32×32: the first convolution keeps the size and no pooling follows it."""
    model = resnet(2, 2, 2, 2, bottleneck=False)
    assert isinstance(model, nn.Sequential)
    model[0], model[3] = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


CASES = (
    Case("6 convolutions", six_convolutions, 32, 32, 10),
    Case("ResNet-18, small images", small_resnet18, 32, 32, 1000),
    Case("ResNet-18", lambda: resnet(2, 2, 2, 2, bottleneck=False), 4, 224, 1000),
)
GPU_CASES = (
    Case("ResNet-18, small images", small_resnet18, 256, 32, 1000),
    Case("ResNet-18", lambda: resnet(2, 2, 2, 2, bottleneck=False), 128, 224, 1000),
)


@bench_command("outliers", threads=True, device=True)
@click.option("--bits", type=click.IntRange(2, 8), default=3, show_default=True, help="Bits per element.")
@click.option(
    "--ratio", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="Share of values kept exactly, AR."
)
@rounds_option(help="Steps of each.")
def command(bits: int, ratio: float, rounds: int, device: str) -> Report:
    """Time V-Quant beside PerGroup, and its training steps beside torch's.

    V-Quant keeps a few large values exactly and the others in few bits. Quantize and dequantize are timed beside
    PerGroup at 4 bits (bar: 2.5 times its time), and steps of convolutional networks whose ReLUs and layers save by
    V-Quant beside torch's own (bar: 1.10), all in turn. Printed are the best of four times as many rounds for the
    quantizers, medians for the steps, and medians of the ratios of each round. "Again" is torch's model beside a copy
    of itself.

    Example: fewbit bench outliers --bits 3 --ratio 0.02 --threads 2
    """
    cases = GPU_CASES if device == "cuda" else CASES
    tasks = [
        *(partial(bench_pair, n, bits, ratio, 4 * rounds, device) for n in SIZES),
        *(partial(bench_step, case, bits, ratio, rounds, device) for case in cases),
    ]
    rows = [task() for task in with_progress(tasks, len(tasks), "measuring")]
    pairs = [row for row in rows if isinstance(row, PairTime)]
    steps = [row for row in rows if isinstance(row, StepTime)]
    here = this_machine(device)
    values = {
        "torch": here.torch,
        "threads": here.threads,
        "device": here.device,
        "bits": bits,
        "ratio": ratio,
        "pairs": [row.to_dict() for row in pairs],
        "steps": [row.to_dict() for row in steps],
    }
    heading = f"torch {here.torch}, {here.where}, {bits} bits, ratio {ratio:g}"
    return Report(values, [heading, *_pair_lines(pairs), "", *_step_lines(steps)])


def bench_pair(n: int, bits: int = 3, outliers: float = 0.02, rounds: int = 60, device: str = "cpu") -> PairTime:
    """Time compress and decompress of `n` normal numbers in 64 samples, and of their ReLU, after two warm-up rounds."""
    x = torch.randn(_SAMPLES, n // _SAMPLES, device=device)
    plain, relu = Outlier(bits, outliers), Outlier(bits, outliers, relu=True, value_dtype=torch.bfloat16)
    runs = {"outlier": _pair(plain, x), "relu": _pair(relu, x.relu()), "per group": _pair(PerGroup(4), x)}
    times = take_turns(runs, rounds, clock=gpu_events if device == "cuda" else processor)
    best, middle = ([of(who) for who in runs] for of in (times.best, times.median))
    ratios = (seconds[i] / seconds[2] for seconds in (best, middle) for i in (0, 1))
    return PairTime(x.numel(), *(1000 * t for t in best), *ratios)


def bench_step(case: Case, bits: int = 3, outliers: float = 0.02, rounds: int = 15, device: str = "cpu") -> StepTime:
    """Time one case after two warm-up rounds."""
    exact = case.build().to(device)
    models = {"fewbit": value_aware(copy.deepcopy(exact), bits, outliers).model, "torch": exact}
    models["again"] = copy.deepcopy(exact)
    x = torch.randn(case.batch, 3, case.size, case.size, device=device)
    labels = torch.randint(0, case.classes, (case.batch,), device=device)
    runs = {who: partial(_step, model, x, labels) for who, model in models.items()}
    finish: Run = torch.cuda.synchronize if device == "cuda" else lambda: None  # on the CPU calls end when they return
    measured = readings(runs, rounds, partial(_meters, finish), after=lambda who: models[who].zero_grad())
    clock, cpu, faults = (Times([{who: read[i] for who, read in row.items()} for row in measured]) for i in range(3))
    counted = _faults() is not None
    return StepTime(
        *(case.name, case.batch, case.size, bits, outliers),
        fewbit_ms=1000 * clock.median("fewbit"),
        torch_ms=1000 * clock.median("torch"),
        ratio=clock.ratio("fewbit", to="torch"),
        again_ratio=clock.ratio("again", to="torch"),
        cpu_ratio=cpu.ratio("fewbit", to="torch"),
        again_cpu_ratio=cpu.ratio("again", to="torch"),
        fewbit_faults=round(faults.median("fewbit")) if counted else None,
        torch_faults=round(faults.median("torch")) if counted else None,
    )


def _pair(quantizer: Quantizer, x: torch.Tensor) -> Run:
    return lambda: quantizer.compress(x).decompress()


def _step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    F.cross_entropy(model(x), labels).backward()


def _meters(finish: Run, run: Run) -> tuple[float, float, int]:
    """Return wall time, process time and page faults of a call, from an idle device until `finish` returns."""
    finish()
    before = time.perf_counter(), time.process_time(), _faults() or 0
    run()
    finish()
    after = time.perf_counter(), time.process_time(), _faults() or 0
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _faults() -> int | None:
    """Return the number of minor page faults of this process so far; None if the system does not count them."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _pair_lines(rows: Sequence[PairTime]) -> list[str]:
    head = ("elements", "V-Quant ms", "of ReLU ms", "PerGroup ms", "ratio", "of ReLU", "met")
    body = [
        (
            *(f"{row.n:,}", *(f"{ms:.2f}" for ms in (row.outlier_ms, row.relu_ms, row.per_group_ms))),
            *(f"{row.ratio:.2f}", f"{row.relu_ratio:.2f}", MET[row.met]),
        )
        for row in rows
    ]
    return list(columns([head, *body], left=0))


def _step_lines(rows: Sequence[StepTime]) -> list[str]:
    head = ("network", "images", "fewbit ms", "torch ms", "ratio", "again", "CPU ratio", "again", "faults", "met")
    body = [
        (
            *(row.case, f"{row.batch}x{row.size}x{row.size}", f"{row.fewbit_ms:.1f}", f"{row.torch_ms:.1f}"),
            *(f"{r:.3f}" for r in (row.ratio, row.again_ratio, row.cpu_ratio, row.again_cpu_ratio)),
            "" if row.fewbit_faults is None else f"{row.fewbit_faults:,} / {row.torch_faults:,}",
            MET[row.met],
        )
        for row in rows
    ]
    return list(columns([head, *body], left=2))
