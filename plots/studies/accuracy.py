"""Accuracy against bits, by how finely ranges and bits are chosen (ActNN, Table 3 and Figures 5, 6 and 9).

    python -m fewbit.plots.studies accuracy

A ResNet of 20 layers learns scikit-learn's digits until its loss no longer falls. All runs of a seed have the same
weights and batches, and differ in how the inputs of layers are saved:

    tensor    one range for all of a tensor, as in BLPA
    group     one range for each 256 values: L2
    sample    and bits for each sample of a layer: the paper's L2.5
    layer     and bits for each layer: L3

The last two know the gradient by a moving average or by that of the same sample in the last epoch, and a group's levels
are uniform or fitted to its values. At 1 bit both are L2: there is nothing to choose.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.allocation import MixedPrecision
from ...runtime.convert.actnn import ActNN
from ...runtime.convert.api import convert
from ...runtime.layers import CompressedLayer, QuantizerSaver
from ...runtime.tensors.levels import FITTED, UNIFORM
from ..demo import trainer
from ..demo.data import endless_indices, shuffled_digits
from ..demo.runs import averaging_window
from ..demo.small_networks import resnet
from ..demo.trainer import Curve, Trainee, cross_entropy, learning_rate_factor
from ..figures.lines import Line, draw_lines
from ..figures.style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle
from ..intervals import Interval, differences, interval
from .curves import tested
from .experiment import Case, Experiment, Row
from .variance import PerTensor

SCALES = ("tensor", "group", "sample", "layer")
MIXED = ("sample", "layer")
WHOLE, FRACTIONS = (1, 2, 3, 4), (1.25, 1.5, 1.75, 2, 3, 4)
GRADIENTS, LEVELS = ("average", "stale"), (UNIFORM, FITTED)
SEEDS = range(5)
STEPS, BATCH, WIDTH, LEARNING_RATE = 250, 64, 8, 0.1
BLOCKS = tuple((WIDTH << stage, 2 if stage and first else 1) for stage in range(3) for first in (True, False, False))
DIVERGED = 99.0  # stands for a loss that is not finite
NEGLIGIBLE = 0.005  # of accuracy: the paper's "negligible (< 0.5 %) accuracy loss"
EXACT: Row = {"scale": "exact", "bits": 32, "gradients": "", "levels": ""}

Condition = Callable[[Mapping[str, Any]], bool]

_images = cache(shuffled_digits)


def settings() -> list[Row]:
    """Return all ways of saving inputs, the exact one first."""
    tensor = [_setting("tensor", bits, "", UNIFORM) for bits in WHOLE]
    group = [_setting("group", bits, "", levels) for levels in LEVELS for bits in WHOLE]
    group.remove(_setting("group", 1, "", FITTED))  # two levels are the ends of the range
    mixed = [_setting(s, bits, g, levels) for s in MIXED for g in GRADIENTS for levels in LEVELS for bits in FRACTIONS]
    return [EXACT, *tensor, *group, *mixed]


def _setting(scale: str, bits: float, gradients: str, levels: str) -> Row:
    return {"scale": scale, "bits": bits, "gradients": gradients, "levels": levels}


def cases() -> list[Case]:
    """Return a case for each seed and setting."""
    return [{**setting, "seed": seed} for seed in SEEDS for setting in settings()]


def compress(model: nn.Module, case: Case) -> MixedPrecision | None:
    """Convert `model` to the case; return what allocates its bits, if anything does."""
    scale, bits, levels = case["scale"], case["bits"], case["levels"]
    if scale == "exact":
        return None
    convert(model, ActNN("L2", 4 if scale in MIXED else bits, group_levels=levels))
    if scale in MIXED:
        return MixedPrecision(model, bits, levels=levels, gradients=case["gradients"], across_layers=scale == "layer")
    if scale == "tensor":
        for layer in model.modules():
            if isinstance(layer, CompressedLayer):
                layer.saver = QuantizerSaver(PerTensor(bits))
    return None


def measure(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Train one network; return its final training loss, test loss and accuracy."""
    data = _images()
    torch.manual_seed(case["seed"])
    model = resnet(nn.ReLU, BLOCKS)
    precision = compress(model, case)
    stream = endless_indices(data, BATCH, case["seed"])
    chosen = [next(stream) for _ in range(steps)]

    def name_samples(step: int) -> None:
        if precision is not None:
            precision.samples(chosen[step])

    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9, weight_decay=1e-4)
    schedule, curve = LambdaLR(optimizer, partial(learning_rate_factor, steps=steps)), Curve()
    trainee = Trainee(model, cross_entropy, optimizer, schedule, before_step=name_samples, record=curve)
    trainer.train([trainee], ((data.training[i], data.training_classes[i]) for i in chosen))
    found = {"final": round(fmean(curve.losses[-averaging_window(steps) :]), 6), **tested(model, data)}
    return {key: value if math.isfinite(value) else DIVERGED for key, value in found.items()}


# ---- what came out ---------------------------------------------------------------------------------------------------


def gaps(rows: Sequence[Row], setting: Mapping[str, Any], value: str) -> Interval | None:
    """Return a setting's values less exact's of the same seeds; None without runs of both."""
    found = differences(rows, lambda row: row["scale"] == "exact", ("seed",), value)
    values = [gap for row, gap in found if setting.items() <= row.items()]
    return interval(values) if values else None


def compared(rows: Sequence[Row], is_first: Condition, is_second: Condition, pair: Sequence[str]) -> Interval | None:
    """Return the final training losses of second rows, in parts of those of first rows that they are paired with.

    The mean, over all pairs of a seed, of the logarithm of the ratio: its interval is over the seeds.
    """
    chosen = [{**row, "log": math.log(row["final"])} for row in rows if is_first(row) or is_second(row)]
    by_seed: dict[int, list[float]] = {}
    for row, gap in differences(chosen, is_first, (*pair, "seed"), "log"):
        by_seed.setdefault(row["seed"], []).append(gap)
    return interval([fmean(values) for values in by_seed.values()]) if by_seed else None


def fewest_bits(rows: Sequence[Row], scale: str) -> float | None:
    """Return the fewest bits, with uniform levels and moving averages, from which on no accuracy is lost.

    It is lost where its difference to exact's is below zero by an interval, or on average more than `NEGLIGIBLE`.
    """
    fewest = None
    for bits in reversed(WHOLE if scale not in MIXED else FRACTIONS):
        gap = gaps(rows, _setting(scale, bits, "average" if scale in MIXED else "", UNIFORM), "accuracy")
        if gap is None or gap.high < 0 or gap.mean < -NEGLIGIBLE:
            return fewest
        fewest = bits
    return fewest


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each setting, for each scale's cliff, and for each comparison of two ways."""
    for setting in settings()[1:]:
        accuracy, loss = (gaps(rows, setting, value) for value in ("accuracy", "loss"))
        if accuracy is not None:
            name = " ".join(str(part) for part in setting.values() if part)
            counts = ", counts" if accuracy.counts else ""
            yield f"{name:28} {accuracy.count} seeds: test loss {loss}, accuracy {accuracy}{counts}"
    for scale in SCALES:
        yield f"per {scale}: no loss of accuracy from {fewest_bits(rows, scale)} bits on"
    for name, found in comparisons(rows):
        yield f"{name}: logarithm of the ratio of training losses {found}{', counts' if found.counts else ''}"


def comparisons(rows: Sequence[Row]) -> Iterator[tuple[str, Interval]]:
    """Yield how each scale compares with the coarser one, stale gradients with averages, fitted levels with uniform."""
    for coarse, fine in pairwise(SCALES):
        usual = [row for row in rows if row["gradients"] != "stale"]
        found = compared(usual, _is("scale", coarse), _is("scale", fine), ("bits", "levels"))
        if found is not None:
            yield f"{fine} after {coarse}", found
    for key, (first, second), others in (
        ("gradients", GRADIENTS, ("scale", "bits", "levels")),
        ("levels", LEVELS, ("scale", "bits", "gradients")),
    ):
        found = compared(rows, _is(key, first), _is(key, second), others)
        if found is not None:
            yield f"{second} after {first}", found


def _is(key: str, value: str) -> Condition:
    return lambda row: row[key] == value


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure."""
    colors = dict(zip(SCALES, (VERMILION, ORANGE, GREEN, BLUE), strict=True))
    losses = [Line(f"per {s}", colors[s], _points(rows, s, "final")) for s in SCALES]
    accuracies = [Line(f"per {s}", colors[s], _points(rows, s, "accuracy", less_exact=True, times=100)) for s in SCALES]
    ways = [
        Line(
            f"{levels}, {gradients}",
            color,
            _points(rows, "layer", "loss", gradients, levels, less_exact=True),
            dashed=levels == FITTED,
        )
        for gradients, color in zip(GRADIENTS, (BLUE, VERMILION), strict=True)
        for levels in LEVELS
    ]
    exact = fmean(row["final"] for row in rows if row["scale"] == "exact")
    cliffs = ", ".join(f"{scale} {fewest_bits(rows, scale) or '–'}" for scale in SCALES)
    return plot_accuracy(
        f"Fewest bits from which on no loss of accuracy shows: per {cliffs} (means and 95 % intervals of five seeds)",
        losses,
        accuracies,
        ways,
        exact,
    )


def _points(
    rows: Sequence[Row],
    scale: str,
    value: str,
    gradients: str = "average",
    levels: str = UNIFORM,
    *,
    less_exact: bool = False,
    times: float = 1,
) -> dict[float, tuple[float, float]]:
    """Return bits → mean and half of the interval."""
    points = {}
    for bits in FRACTIONS if scale in MIXED else WHOLE:
        setting = _setting(scale, bits, gradients if scale in MIXED else "", levels)
        values = [row[value] for row in rows if setting.items() <= row.items()]
        found = gaps(rows, setting, value) if less_exact else interval(values) if values else None
        if found is not None:
            points[bits] = times * found.mean, times * found.half
    return points


def seconds(case: Case) -> float:
    """Return how long a case takes, about, beside another on two cores."""
    return {"exact": 6, "tensor": 12, "group": 12}.get(case["scale"], 22)


EXPERIMENT = Experiment("accuracy", cases, measure, seconds, lines, draw)


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_accuracy(
    message: str, losses: Sequence[Line], gaps: Sequence[Line], ways: Sequence[Line], exact: float
) -> Figure:
    """Return a figure of three panels against bits.

    Args:
        message: the title.
        losses: final training losses, a line for each scale.
        gaps: test accuracies less exact's, in points, for each scale.
        ways: test losses less exact's of mixed precision, for each estimate of gradients and kind of levels.
        exact: the final training loss of exact runs.
    """
    figure = Figure(figsize=(13.2, 4.2), layout="constrained", facecolor="white")
    entitle(figure, message)
    falling, right, comparing = figure.subplots(1, 3)
    draw_lines(falling, losses, "bits", "final training loss; dotted: exact", scale=("log", "log"))
    falling.axhline(exact, color=INK, linewidth=1, linestyle=":")
    draw_lines(right, gaps, "bits", "test accuracy less exact's, points", scale=("log", "symlog"))
    right.yaxis.set_major_formatter("{x:g}")
    draw_lines(comparing, ways, "bits", "per layer: test loss less exact's", scale=("log", "linear"))
    for axes in (right, comparing):
        axes.axhline(0, color=INK, linewidth=1, linestyle=":")
    return figure
