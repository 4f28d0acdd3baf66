"""The largest batch and network that train in a limited memory, by trial (ActNN and BLPA).

Of ActNN Tables 5 and 6, Figures 1 and 7; of BLPA Table 2.

    python -m fewbit.plots.studies largest

A trial is a step of training (forward, backward, SGD with momentum) in a process whose memory is limited: weights,
gradients, momentum, activations and all scratch memory have to fit. What is freed is returned to the system at once;
for the batch of a ResNet-152 there are also trials with glibc as it is, and the gaps that it keeps. The search begins
at what the counted peak of a step on the meta device predicts. A row has the largest number that fits, the prediction,
and the images a second of each trial that fits.

    ResNet-152    batch: exact, L1, L2, L3 (2 bits), checkpoints of exact inputs of blocks, hooks of 4 bits; and at a
                  fixed batch depth, width and resolution: exact, L2, L3
    BLPA          batch of pre-activation networks of 164 to 1001 layers: exact and 4 bits
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ...runtime.convert.api import convert
from ...runtime.memory.malloc import return_freed_memory
from ...runtime.models import preact_resnet
from ...runtime.plan.largest_batch import largest_by_trial
from ...runtime.plan.memory import parameter_bytes, peak_of_step
from ...runtime.quantizers import PerGroup
from ...runtime.saved.checkpoint import checkpoint
from ...runtime.saved.hooks import compress_saved_tensors
from ..demo.trainer import cross_entropy
from ..figures.largest import Found, plot_largest
from .blpa_memory import COPIES
from .experiment import Case, Experiment, Row
from .limited import limited
from .networks import resnet

EXACT, HOOKS, CHECKPOINT, FEW = "exact", "hooks, 4 bits", "checkpoints", "4 bits"
METHODS = (EXACT, "L1", "L2", "L3", CHECKPOINT, HOOKS)
SCALED = (EXACT, "L2", "L3")  # methods of the largest networks
DIMENSIONS = ("depth", "width", "resolution")
LAYERS = (164, 254, 488, 1001)
BATCH = "batch"
KEPT = "ResNet-152, freed memory kept"
TOLERANCE = 0.03
FRACTIONS = (8, 4, 2)  # of the largest batch: further points of the throughput


class Hooked(nn.Module):
    """A model whose saved tensors are compressed to 4 bits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        with compress_saved_tensors(PerGroup(4)):
            return self.model(x)


@dataclass(frozen=True)
class Setting:
    """A network, a batch, and the memory for a step.

    Attributes:
        room: bytes.
        stages: blocks of a ResNet; or the number of layers of a pre-activation network.
        width: channels of the first stage.
        size: of the square images.
        batch: images of a step.
        method: of `METHODS`, or `FEW`.
        returned: whether freed memory goes back to the system at once.
    """

    room: int
    stages: tuple[int, ...] | int
    width: int
    size: int
    batch: int
    method: str = EXACT
    returned: bool = True

    def model(self) -> nn.Module:
        """Return the network that saves by the method; on torch's default device."""
        if isinstance(self.stages, int):
            return preact_resnet(self.stages, width=self.width, bits=4 if self.method == FEW else None)
        model = resnet(*self.stages, bottleneck=True, width=self.width)
        if self.method == HOOKS:
            return Hooked(model)
        if self.method == CHECKPOINT:
            checkpoint(model, bits=None)
        elif self.method != EXACT:
            convert(model, level=self.method)
        return model

    def at(self, what: str, number: int) -> "Setting":
        """Return the setting with this batch, or this number of steps of a dimension of its ResNet."""
        if what == "depth":
            assert not isinstance(self.stages, int)
            return replace(self, stages=(*self.stages[:2], number, *self.stages[3:]))
        key, step = _STEPS[what]
        return replace(self, **{key: number * step})

    def value(self, what: str) -> int:
        """Return the batch, or the layers, width or resolution."""
        if what == "depth":
            assert not isinstance(self.stages, int)
            return 3 * sum(self.stages) + 2
        key, _ = _STEPS[what]
        return getattr(self, key)

    def number(self, what: str) -> int:
        """Return the number that `at` takes for this setting."""
        if what == "depth":
            assert not isinstance(self.stages, int)
            return self.stages[2]
        _, step = _STEPS[what]
        return self.value(what) // step


# What is enlarged evenly: the attribute of a setting, and by how much at once.
_STEPS = {BATCH: ("batch", 1), "width": ("width", 4), "resolution": ("size", 8)}
_RESNET = Setting(room=3 << 29, stages=(3, 8, 36, 3), width=64, size=64, batch=48)
NETWORKS: Mapping[str, Setting] = {
    "ResNet-152": _RESNET,
    KEPT: replace(_RESNET, returned=False),
    **{f"BLPA-{layers}": Setting(3 << 28, layers, width=16, size=32, batch=32) for layers in LAYERS},
}


def step_seconds(setting: Setting) -> float:
    """Train for a step of a small batch, which makes the momentum, and one of the batch; return its time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = setting.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    seconds = 0.0
    for batch in (2, setting.batch):
        x, y = torch.randn(batch, 3, setting.size, setting.size), torch.randint(10, (batch,))
        start = time.perf_counter()
        cross_entropy(model, (x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
    return seconds


def warm_up(setting: Setting) -> None:
    """Take a step of a small network by the same method, with memory returned or kept from here on."""
    if setting.returned:
        return_freed_memory()
    stages = 11 if isinstance(setting.stages, int) else (1, 1, 1, 1)
    step_seconds(replace(setting, stages=stages, width=8, size=32, batch=2))


def predicted_bytes(setting: Setting) -> int:
    """Return weights, gradients, momentum and the counted peak of a step, on the meta device."""
    with torch.device("meta"):
        model = setting.model()
        x = torch.empty(setting.batch, 3, setting.size, setting.size)
    return COPIES * parameter_bytes(model) + peak_of_step(model, x).bytes


def prediction(setting: Setting, what: str) -> int:
    """Return the largest number by counted bytes, nearly: 0 if even 1 needs more than the room."""

    def fits(number: int) -> bool:
        return predicted_bytes(setting.at(what, number)) <= setting.room

    return largest_by_trial(fits, setting.number(what), TOLERANCE)


# ---- the experiment --------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Return a case for each network, each quantity to enlarge, and each method."""
    batches = [{"network": "ResNet-152", "what": BATCH, "method": m} for m in METHODS]
    kept = [{**case, "network": KEPT} for case in batches]
    scaled = [{"network": "ResNet-152", "what": d, "method": m} for d in DIMENSIONS for m in SCALED]
    blpa = [{"network": f"BLPA-{n}", "what": BATCH, "method": m} for n in LAYERS for m in (EXACT, FEW)]
    return [*batches, *scaled, *blpa, *kept]


def measure(case: Case, networks: Mapping[str, Setting] = NETWORKS) -> dict[str, Any]:
    """Find the largest number by trial; return its value, that predicted, and the images a second of the trials."""
    setting, what = replace(networks[case["network"]], method=case["method"]), case["what"]
    seconds: dict[int, float | None] = {}

    def fits(number: int) -> bool:
        if number not in seconds:
            tried = setting.at(what, number)
            seconds[number] = limited(partial(step_seconds, tried), tried.room, partial(warm_up, tried))
        return seconds[number] is not None

    predicted = prediction(setting, what)
    largest = largest_by_trial(fits, max(1, round(predicted * SHARE)), TOLERANCE)
    trials = len(seconds)
    for fraction in FRACTIONS if what == BATCH else ():
        if largest >= fraction:
            fits(largest // fraction)
    found = {number: taken for number, taken in sorted(seconds.items()) if taken is not None}
    speeds = [
        [setting.at(what, number).value(what), float(f"{setting.at(what, number).batch / taken:.4g}")]
        for number, taken in found.items()
    ]
    values = {"largest": largest, "predicted": predicted}
    return {
        **{name: setting.at(what, number).value(what) if number else 0 for name, number in values.items()},
        "trials": trials,
        "images_per_second": speeds,
    }


SHARE = 0.95  # of the prediction, at which the search begins: scratch memory is not in it


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row: the largest number, as a multiple of exact's, that predicted, and images a second."""
    for row in rows:
        exact = _row(rows, row["network"], row["what"], EXACT)
        times = f"×{row['largest'] / exact['largest']:.2f} of exact's" if exact and exact["largest"] else ""
        speed = row["images_per_second"][-1][1] if row["images_per_second"] else 0.0
        yield (
            f"{row['network']:29} {row['what']:10} {row['method']:13} largest {row['largest']:5} {times}, "
            f"predicted {row['predicted']}, {speed:.3g} images a second, {row['trials']} trials"
        )


def _row(rows: Sequence[Row], network: str, what: str, method: str) -> Row | None:
    key = {"network": network, "what": what, "method": method}
    return next((row for row in rows if key.items() <= row.items()), None)


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: throughput against batch, the largest networks, and BLPA's largest batches and times."""

    def found(network: str, what: str, methods: Sequence[str]) -> dict[str, Found]:
        there = ((method, _row(rows, network, what, method)) for method in methods)
        return {m: Found(row["largest"], row["images_per_second"]) for m, row in there if row and row["largest"]}

    return plot_largest(
        found("ResNet-152", BATCH, METHODS),
        {dimension: found("ResNet-152", dimension, SCALED) for dimension in DIMENSIONS},
        {layers: found(f"BLPA-{layers}", BATCH, (EXACT, FEW)) for layers in LAYERS},
    )


_SECONDS = {EXACT: 50, "L1": 55, "L2": 200, "L3": 320, CHECKPOINT: 120, HOOKS: 110, FEW: 150}


def seconds(case: Case) -> float:
    """Return how long a case takes, about."""
    return _SECONDS[case["method"]]


EXPERIMENT = Experiment("largest", cases, measure, seconds, lines, draw, workers=1)
