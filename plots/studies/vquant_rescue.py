"""V-Quant where few bits fail: a ResNet-50 that 2 bits break, and few large values mend (V-Quant, Tables 1, 2 and 5).

    python -m fewbit.plots.studies vquant_rescue

A ResNet of 50 layers in bottlenecks, 8 channels wide, learns scikit-learn's digits. All runs of a seed have the same
weights and batches, and differ in what is saved of layers and ReLUs: (bits, large values in percent), for all of the
training or for each third of it, (F) for full precision. Forward passes and normalizations are exact, as in the paper.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from ..demo.data import digits
from ..demo.digits import Schedule, train
from ..figures.lines import Line, draw_lines
from ..figures.style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, style_axes
from ..intervals import Interval, differences, interval
from . import networks
from .experiment import Case, Experiment, Row
from .vquant import Phases, annealer

METHODS = ("V-Quant", "RV-Quant")
BITS, PERCENTS = (2, 3), (0, 1, 2, 3)
# Table 5: the first of each pair falls, the second is its reverse. All with RV-Quant.
PAIRS = (
    ("(3,2)-(2,1)-(2,0)", "(2,0)-(2,1)-(3,2)"),
    ("(3,2)-(3,1)-(3,0)", "(3,0)-(3,1)-(3,2)"),
    ("(F)-(3,2)-(2,0)", "(2,0)-(3,2)-(F)"),
    ("(3,2)-(3,1)-(2,0)", "(2,0)-(3,1)-(3,2)"),
    ("(F)-(2,1)-(2,0)", "(2,0)-(2,1)-(F)"),
)
EXACT = "(F)"
SEEDS = range(5)
DEPTHS, WIDTH = (3, 4, 6, 3), 8
SCHEDULE = Schedule(epochs=15, learning_rate=0.05)
RESCUED = 0.01  # of accuracy: the paper's 2 bits with 1 % are .3 to .6 points below full precision
DIVERGED = 99.0  # stands for a loss that is not finite

# Top-1 accuracy of the paper's ResNet-50.
PAPER: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("exact", EXACT): 75.92,
        **{("V-Quant", f"(2,{p})"): top for p, top in zip(PERCENTS, (65.75, 75.65, 75.64, 75.66), strict=True)},
        **{("V-Quant", f"(3,{p})"): top for p, top in zip(PERCENTS, (75.49, 75.71, 75.92, 75.93), strict=True)},
        **{("RV-Quant", f"(2,{p})"): top for p, top in zip(PERCENTS, (35.52, 75.34, 75.41, 75.67), strict=True)},
        **{("RV-Quant", f"(3,{p})"): top for p, top in zip(PERCENTS, (75.16, 75.88, 75.93, 75.66), strict=True)},
        ("RV-Quant", "(3,2)-(2,1)-(2,0)"): 75.01,
        ("RV-Quant", "(2,0)-(2,1)-(3,2)"): 47.35,
        ("RV-Quant", "(3,2)-(3,1)-(3,0)"): 75.72,
        ("RV-Quant", "(3,0)-(3,1)-(3,2)"): 75.60,
        ("RV-Quant", "(F)-(3,2)-(2,0)"): 75.45,
        ("RV-Quant", "(2,0)-(3,2)-(F)"): 50.36,
        ("RV-Quant", "(3,2)-(3,1)-(2,0)"): 75.34,
        ("RV-Quant", "(2,0)-(3,1)-(3,2)"): 48.67,
        ("RV-Quant", "(F)-(2,1)-(2,0)"): 75.38,
        ("RV-Quant", "(2,0)-(2,1)-(F)"): 52.72,
    }
)

_images = cache(digits)


@dataclass(frozen=True)
class Direction:
    """A schedule and its reverse.

    Attributes:
        falls, rises: in the paper's notation.
        falling, rising: accuracies of each seed, in percent.
    """

    falls: str
    rises: str
    falling: Sequence[float]
    rising: Sequence[float]


def cases() -> list[Case]:
    """Return a case for each seed and cell of the paper's tables."""
    return [{"method": method, "phases": phases, "seed": seed} for seed in SEEDS for method, phases in PAPER]


def phases_of(text: str) -> Phases:
    """Return (bits, AR in percent) of each phase of a schedule in the paper's notation."""
    parts = (part.strip("()").split(",") for part in text.split("-"))
    return tuple((None, 0.0) if part == ["F"] else (int(part[0]), float(part[1])) for part in parts)


def measure(case: Case, schedule: Schedule = SCHEDULE) -> dict[str, Any]:
    """Train one network; return its accuracy on the test images and the training loss of each epoch."""
    torch.manual_seed(case["seed"])
    model = network()
    seeded = Schedule(schedule.epochs, schedule.batch, schedule.learning_rate, case["seed"])
    if case["method"] == "exact":
        found = train(model, _images(), seeded)
    else:
        relu_codes = case["method"] == "RV-Quant"
        annealing = annealer(model, phases_of(case["phases"]), schedule.epochs, relu_codes=relu_codes)
        found = train(model, _images(), seeded, after_epoch=annealing.step)
    losses = [round(loss, 5) if math.isfinite(loss) else DIVERGED for loss in found.losses]
    return {"accuracy": round(found.accuracy, 6), "loss": losses[-1], "losses": losses}


def network() -> nn.Module:
    """Return the ResNet for grey images of 8×8 pixels."""
    return networks.resnet(*DEPTHS, bottleneck=True, width=WIDTH, small=True, classes=10)


# ---- what came out ---------------------------------------------------------------------------------------------------


def gap(rows: Sequence[Row], method: str, phases: str, value: str = "accuracy") -> Interval | None:
    """Return values less exact's of the same seeds; None without runs of both."""
    found = differences(rows, lambda row: row["method"] == "exact", ("seed",), value)
    values = [less for row, less in found if (row["method"], row["phases"]) == (method, phases)]
    return interval(values) if values else None


def direction(rows: Sequence[Row], falls: str, rises: str) -> Interval | None:
    """Return the accuracy of a schedule that falls less that of its reverse, paired by seed."""
    both = [row for row in rows if row["phases"] in (falls, rises)]
    found = differences(both, lambda row: row["phases"] == rises, ("seed",), "accuracy")
    values = [more for _, more in found]
    return interval(values) if values else None


def fails(found: Interval) -> bool:
    """Return whether accuracy is lost: below exact's by an interval, or on average by more than `RESCUED`."""
    return found.high < 0 or found.mean < -RESCUED


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each cell, the paper's difference to full precision beside ours, and one for each pair."""
    for method, phases in [*PAPER][1:]:
        accuracy, loss = gap(rows, method, phases), gap(rows, method, phases, "loss")
        if accuracy is not None:
            paper = (PAPER[method, phases] - PAPER["exact", EXACT]) / 100
            verdict = ", fails" if fails(accuracy) else ""
            yield (
                f"{method:8} {phases:18} {accuracy.count} seeds: accuracy {accuracy} (paper {paper:+.4f}), "
                f"training loss {loss}{verdict}"
            )
    for falls, rises in PAIRS:
        found = direction(rows, falls, rises)
        if found is not None:
            yield f"{falls} less {rises}: accuracy {found}{', counts' if found.counts else ''}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure."""
    colors = {("V-Quant", 2): ORANGE, ("V-Quant", 3): GREEN, ("RV-Quant", 2): VERMILION, ("RV-Quant", 3): BLUE}
    ratios = [Line(f"{m}, {b} bits", color, _points(rows, m, b)) for (m, b), color in colors.items()]
    pairs = [
        Direction(falls, rises, _accuracies(rows, falls), _accuracies(rows, rises))
        for falls, rises in PAIRS
        if _accuracies(rows, falls) and _accuracies(rows, rises)
    ]
    exact = 100 * fmean(row["accuracy"] for row in rows if row["method"] == "exact")
    means = [fmean(found) for p in PERCENTS[:2] if (found := _accuracies(rows, f"(2,{p})"))]
    told = ", ".join(f"{mean:.1f} % with {p} % large values" for p, mean in zip(PERCENTS, means, strict=False))
    return plot_rescue(f"50 layers, 2 bits (RV-Quant): accuracy {told}, {exact:.1f} % exact", ratios, pairs, exact)


def _accuracies(rows: Sequence[Row], phases: str, method: str = "RV-Quant") -> list[float]:
    return [100 * row["accuracy"] for row in rows if (row["method"], row["phases"]) == (method, phases)]


def _points(rows: Sequence[Row], method: str, bits: int) -> dict[float, tuple[float, float]]:
    """Return percent of large values → mean accuracy and half of its interval."""
    found = {p: _accuracies(rows, f"({bits},{p})", method) for p in PERCENTS}
    known = {p: interval(values) for p, values in found.items() if values}
    return {p: (one.mean, one.half) for p, one in known.items()}


EXPERIMENT = Experiment(
    "vquant_rescue", cases, measure, lambda case: 25 if case["method"] == "exact" else 43, lines, draw
)


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_rescue(message: str, ratios: Sequence[Line], pairs: Sequence[Direction], exact: float) -> Figure:
    """Return a figure of two panels.

    Args:
        message: the title.
        ratios: accuracies in percent against the percent of large values.
        pairs: schedules.
        exact: accuracy of exact training, in percent.
    """
    figure = Figure(figsize=(11.4, 4.2), layout="constrained", facecolor="white")
    entitle(figure, message)
    left, right = figure.subplots(1, 2)
    draw_lines(left, ratios, "large values, %", "test accuracy, %; dotted: exact")
    left.axhline(exact, color=INK, linewidth=1, linestyle=":")
    left.set_ylim(top=101)  # an interval may reach beyond what an accuracy can
    _draw_pairs(right, pairs, exact)
    return figure


def _draw_pairs(axes: Axes, pairs: Sequence[Direction], exact: float) -> None:
    """Draw a row for each pair: few bits late above the line, few bits early below it."""
    style_axes(axes)
    axes.set_title("accuracy, %, of (bits, % of large values) by third", fontsize=9.5, color=INK, loc="left")
    for place, pair in enumerate(pairs):
        ways = ((pair.falling, BLUE, "few bits late", -0.13), (pair.rising, VERMILION, "few bits early", 0.13))
        for values, color, name, shift in ways:
            axes.plot(values, [place + shift] * len(values), "o", color=color, markersize=4.5, alpha=0.6)
            axes.plot(fmean(values), place + shift, "|", color=color, markersize=13, markeredgewidth=2)
            if place == 0:
                above = {"xytext": (0, 12 if shift < 0 else -12), "textcoords": "offset points"}
                axes.annotate(name, (fmean(values), place + shift), ha="center", va="center", color=color, **above)
    axes.axvline(exact, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(pairs)), [f"{pair.falls}\n{pair.rises}" for pair in pairs], fontsize=8.5)
    axes.set_ylim(len(pairs) - 0.5, -0.7)
