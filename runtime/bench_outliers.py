"""Time of V-Quant: the quantizer beside `PerGroup`, and training steps of convolutional networks beside torch's.

All contestants take turns, so that a machine whose speed drifts slows them alike. Of the quantizers the best of
the rounds counts, as in `bench_quantizers`; of steps, medians over rounds of the ratio within a round.
In a step torch takes part twice, once as `again`: what two equal models differ by is noise. Beside the clock stands the
time of the process, which other work on the machine disturbs less (with more than one thread it counts the time that
threads wait for each other, too), and page faults: memory that the allocator gave back to the system and has to ask for
again, which is torch's own time and chance.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..plots.studies.networks import conv, resnet
from .inference.vquant import value_aware
from .quantizers import Outlier, PerGroup, Quantizer

PAIR_BAR = 2.5  # times PerGroup at 4 bits, compress and decompress in turn
STEP_BAR = 1.10  # times torch's step
SIZES = (1 << 20, 1 << 22, 1 << 24)
_SAMPLES = 64


@dataclass(frozen=True)
class PairTime:
    """Milliseconds of compress and decompress in turn, each the best of the rounds.

    Attributes:
        n: elements, float32.
        outlier_ms, relu_ms, per_group_ms: V-Quant, RV-Quant of ReLU's output, PerGroup at 4 bits.
        ratio, relu_ratio: of the first two to the third.
        median_ratio, relu_median_ratio: the same of medians.
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
        build: makes it, with weights of its own.
        classes: that it tells apart.
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
        batch, size: images, and their sides.
        bits, outliers: of V-Quant.
        fewbit_ms, torch_ms: by the clock.
        ratio, again_ratio: of V-Quant, and of a second copy of torch's model, to torch.
        cpu_ratio, again_cpu_ratio: the same of the process's time.
        fewbit_faults, torch_faults: page faults of a step; None where the system does not tell.
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
        """Whether the bar is met, by the clock."""
        return self.ratio <= STEP_BAR

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": STEP_BAR, "met": self.met}


def six_convolutions() -> nn.Module:
    """Return convolutions of 64 to 256 channels with batch normalisation and ReLU, in the manner of VGG."""
    first, second, third = ((*conv(a, b), *conv(b, b)) for a, b in ((3, 64), (64, 128), (128, 256)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(*first, nn.MaxPool2d(2), *second, nn.MaxPool2d(2), *third, *head)


def small_resnet18() -> nn.Module:
    """Return ResNet-18 as it is taken for images of 32×32: its first convolution keeps the size, and none is pooled."""
    model = resnet(2, 2, 2, 2, bottleneck=False)
    assert isinstance(model, nn.Sequential)
    model[0], model[3] = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


CASES = (
    Case("6 convolutions", six_convolutions, 32, 32, 10),
    Case("ResNet-18, small images", small_resnet18, 32, 32, 1000),
    Case("ResNet-18", lambda: resnet(2, 2, 2, 2, bottleneck=False), 4, 224, 1000),
)


def bench_pair(n: int, bits: int = 3, outliers: float = 0.02, rounds: int = 60) -> PairTime:
    """Time compress and decompress of `n` normal numbers, of 64 samples, and of their ReLU; two rounds warm up."""
    x = torch.randn(_SAMPLES, n // _SAMPLES)
    plain, relu = Outlier(bits, outliers), Outlier(bits, outliers, relu=True, value_dtype=torch.bfloat16)
    contestants: list[tuple[Quantizer, torch.Tensor]] = [(plain, x), (relu, x.relu()), (PerGroup(4), x)]
    seconds = [[_pair(quantizer, values) for quantizer, values in contestants] for _ in range(rounds + 2)][2:]
    columns = list(zip(*seconds, strict=True))
    best, middle = ([of(times) for times in columns] for of in (min, statistics.median))
    ratios = (times[i] / times[2] for times in (best, middle) for i in (0, 1))
    return PairTime(x.numel(), *(1000 * t for t in best), *ratios)


def bench_step(case: Case, bits: int = 3, outliers: float = 0.02, rounds: int = 15) -> StepTime:
    """Time one case; two rounds first, to warm up, are not counted."""
    exact = case.build()
    models = [value_aware(copy.deepcopy(exact), bits, outliers).model, exact, copy.deepcopy(exact)]
    x, labels = torch.randn(case.batch, 3, case.size, case.size), torch.randint(0, case.classes, (case.batch,))
    measured = [[_step(model, x, labels) for model in models] for _ in range(rounds + 2)][2:]

    def median(model: int, what: int) -> float:
        return statistics.median(row[model][what] for row in measured)

    def ratio(model: int, what: int) -> float:
        return statistics.median(row[model][what] / row[1][what] for row in measured)

    faults = [None if _faults() is None else round(median(model, 2)) for model in (0, 1)]
    return StepTime(
        *(case.name, case.batch, case.size, bits, outliers, 1000 * median(0, 0), 1000 * median(1, 0)),
        *(ratio(0, 0), ratio(2, 0), ratio(0, 1), ratio(2, 1), *faults),
    )


def _pair(quantizer: Quantizer, x: torch.Tensor) -> float:
    start = time.perf_counter()
    result = quantizer.compress(x).decompress()
    seconds = time.perf_counter() - start
    del result  # giving memory back is not timed
    return seconds


def _step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, int]:
    """Return seconds, seconds of the process, and page faults."""
    before = time.perf_counter(), time.process_time(), _faults() or 0
    F.cross_entropy(model(x), labels).backward()
    after = time.perf_counter(), time.process_time(), _faults() or 0
    model.zero_grad()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _faults() -> int | None:
    """Return the page faults of this process so far that needed no disk; None where there is no such count."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
