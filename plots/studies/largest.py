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

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from torch import Tensor, nn

from ...runtime.convert.api import convert
from ...runtime.memory.allocator import return_freed_memory
from ...runtime.models import preact_resnet
from ...runtime.plan.largest_batch import largest_by_trial
from ...runtime.plan.memory import parameter_bytes, peak_of_step
from ...runtime.quantizers import PerGroup
from ...runtime.saved.checkpoint import checkpoint
from ...runtime.saved.hooks import compress_saved_tensors
from ..demo.trainer import cross_entropy
from ..figures.style import CYCLE, INK, entitle, label_ends, style_axes
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


_EXACT = "exact"


@dataclass(frozen=True)
class Found:
    """The largest number that fits by one method.

    Attributes:
        largest: the number.
        speeds: (number, images a second) of the trials that fit.
    """

    largest: int
    speeds: Sequence[Sequence[float]]


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


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_largest(
    batches: Mapping[str, Found], scaled: Mapping[str, Mapping[str, Found]], blpa: Mapping[int, Mapping[str, Found]]
) -> Figure:
    """Return the figure.

    Args:
        batches: of a ResNet-152 by method.
        scaled: by dimension and method.
        blpa: batches of BLPA's networks by layers and method.
    """
    figure = Figure(figsize=(9.6, 6.8), layout="constrained", facecolor="white")
    entitle(figure, _message(batches))
    (first, second), (third, fourth) = figure.subplots(2, 2)
    colors = {name: INK if name == _EXACT else CYCLE[i - 1] for i, name in enumerate(batches)}
    _draw_speeds(first, batches, colors)
    _draw_scaled(second, scaled, colors)
    _draw_layers(third, {n: {m: f.largest for m, f in found.items()} for n, found in blpa.items()})
    third.set_title("BLPA: the largest batch", fontsize=9.5, loc="left")
    times = {n: {m: 1000 / f.speeds[-1][1] for m, f in found.items()} for n, found in blpa.items()}
    _draw_layers(fourth, times)
    fourth.set_title("BLPA: milliseconds an image, each at its largest batch", fontsize=9.5, loc="left")
    return figure


def _draw_speeds(axes: Axes, batches: Mapping[str, Found], colors: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_xscale("log", base=2)
    ends = []
    for name, found in batches.items():
        sizes, speeds = zip(*found.speeds, strict=True)
        axes.plot(sizes, speeds, color=colors[name], linewidth=1.5)
        axes.plot(sizes[-1], speeds[-1], "X", color=colors[name], markersize=7)
        ends.append((f"{name}, {found.largest}", speeds[-1], colors[name]))
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("batch; cross: the largest that fits")
    axes.set_title("ResNet-152: images a second", fontsize=9.5, loc="left")


def _draw_scaled(axes: Axes, scaled: Mapping[str, Mapping[str, Found]], colors: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.grid(False, axis="x")
    methods = [*dict.fromkeys(name for found in scaled.values() for name in found if name != _EXACT)]
    for i, name in enumerate(methods):
        for place, found in enumerate(scaled.values()):
            if name in found and _EXACT in found:
                x, times = place + 0.38 * (i - (len(methods) - 1) / 2), found[name].largest / found[_EXACT].largest
                axes.bar(x, times, 0.34, color=colors.get(name, CYCLE[i]))
                axes.text(x, times, f"{name}: {found[name].largest}", ha="center", va="bottom", size=8)
    names = [f"{d}\nexact: {found[_EXACT].largest if _EXACT in found else '?'}" for d, found in scaled.items()]
    axes.set_xticks(np.arange(len(scaled)), names)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_title("ResNet-152 at a fixed batch: times exact's", fontsize=9.5, loc="left")


def _draw_layers(axes: Axes, values: Mapping[int, Mapping[str, float]]) -> None:
    style_axes(axes)
    methods = [*dict.fromkeys(name for found in values.values() for name in found)]
    for i, name in enumerate(methods):
        points = [(layers, found[name]) for layers, found in values.items() if name in found]
        color = INK if name == _EXACT else CYCLE[i - 1]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, linewidth=1.5)
        axes.annotate(name, points[-1], (6, 0), textcoords="offset points", va="center", size=8.5, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.15)
    axes.set_xticks([*values], [*map(str, values)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("layers")


def _message(batches: Mapping[str, Found]) -> str:
    if _EXACT not in batches or len(batches) < 2:
        return "The largest that fits into a limited memory"
    name = max(batches, key=lambda each: batches[each].largest)
    times = batches[name].largest / batches[_EXACT].largest
    return f"In the same memory {name} trains a ResNet-152 on batches {times:.1f} times as large as exact training"
