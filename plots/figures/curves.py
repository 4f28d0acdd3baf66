"""Training losses of exact and few-bit activations on the left, the accuracy less exact's with its interval right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, style_axes

_COLORS = {0: INK, 1: VERMILION, 2: ORANGE, 3: GREEN, 4: BLUE}


@dataclass(frozen=True)
class Curves:
    """The runs with one activation.

    Attributes:
        name: of the activation.
        losses: by bits, of which 0 is exact: a curve for each seed.
        gaps: by bits: accuracies less that of the exact run of the same seed.
    """

    name: str
    losses: Mapping[int, Sequence[Sequence[float]]]
    gaps: Mapping[int, Sequence[float]]


def plot_curves(message: str, rows: Sequence[Curves], steps: Sequence[int]) -> Figure:
    """Return a figure with a row of two panels for each activation.

    Args:
        message: the title.
        rows: of the activations.
        steps: of the points of a curve.
    """
    figure = Figure(figsize=(8.4, 0.9 + 2.1 * len(rows)), layout="constrained", facecolor="white")
    entitle(figure, message)
    for i, (row, (left, right)) in enumerate(zip(rows, figure.subplots(len(rows), 2, squeeze=False), strict=True)):
        _draw_losses(left, row, steps)
        style_axes(right)
        right.axhline(0, color=INK, linewidth=0.8)
        for bits, gaps in row.gaps.items():
            points = [100 * gap for gap in gaps]
            right.plot([bits] * len(points), points, "o", color=_COLORS[bits], alpha=0.6, markersize=4)
            if points:
                right.plot([bits - 0.2, bits + 0.2], [fmean(points)] * 2, color=_COLORS[bits], linewidth=2.5)
        right.set_xticks(list(row.gaps))
        if i == 0:
            left.set_title("training loss, mean and range over seeds", fontsize=10, loc="left")
            right.set_title("test accuracy less exact's, in points", fontsize=10, loc="left")
        if i == len(rows) - 1:
            left.set_xlabel("step")
            right.set_xlabel("bits")
    return figure


def _draw_losses(axes: Axes, row: Curves, steps: Sequence[int]) -> None:
    style_axes(axes)
    for bits, curves in row.losses.items():
        color = _COLORS[bits]
        shown = steps[: len(curves[0])]
        values = [*zip(*curves, strict=True)]
        axes.fill_between(shown, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12, lw=0)
        axes.plot(shown, [fmean(v) for v in values], color=color, linewidth=1.6, label="exact" if not bits else None)
    ends = sorted((fmean(curve[-1] for curve in curves), bits) for bits, curves in row.losses.items())
    names = ", ".join("exact" if not bits else f"{bits}" for _, bits in ends)
    axes.set_yscale("log")
    axes.set_ylabel(row.name)
    text = f"at the end, from below: {names} bits"
    axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top", size=8)
