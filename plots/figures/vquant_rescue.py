"""V-Quant where few bits fail: accuracy against the ratio of large values, and schedules beside their reverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .lines import Line, draw_lines
from .style import BLUE, INK, VERMILION, entitle, style_axes


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
