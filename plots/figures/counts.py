"""Tables of memory by count: ActNN's activations by level, and V-Quant's table beside the peak of a whole step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, label_ends, style_axes

_COLORS = (INK, ORANGE, BLUE)


@dataclass(frozen=True)
class Level:
    """What a level saves.

    Attributes:
        name: of the level.
        counted, printed: batch → GiB, ours and the paper's.
    """

    name: str
    counted: Mapping[int, float]
    printed: Mapping[int, float]


@dataclass(frozen=True)
class Step:
    """A network under V-Quant: GB that the paper prints, by its formula, and at the peak of a step.

    Attributes:
        network: its name.
        paper, formula: of the inputs of layers.
        peak, peak_norms: of a whole step, with normalizations exact and compressed.
    """

    network: str
    paper: float
    formula: float
    peak: float
    peak_norms: float


def plot_counts(levels: Sequence[Level], steps: Sequence[Step]) -> Figure:
    """Return a figure of two panels."""
    figure = Figure(figsize=(11.4, 4.4), layout="constrained", facecolor="white")
    off = [abs(level.counted[b] / printed - 1) for level in levels for b, printed in level.printed.items()]
    more = sorted(step.peak / step.paper for step in steps)
    parts = [
        *([f"ActNN's activations are within {100 * max(off):.0f} % of the paper's"] if off else []),
        *([f"a step under V-Quant peaks at {more[0]:.1f} to {more[-1]:.1f} times its table"] if more else []),
    ]
    entitle(figure, "; ".join(parts))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _draw_levels(left, levels)
    if steps:
        _draw_steps(right, steps)
        figure.legend(loc="outside lower right", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _draw_levels(axes: Axes, levels: Sequence[Level]) -> None:
    style_axes(axes)
    axes.set_title("ResNet-152: activations, GiB; rings: ActNN's Table 5", fontsize=9.5, color=INK, loc="left")
    for level, color in zip(levels, _COLORS, strict=False):
        axes.plot([*level.counted], [*level.counted.values()], color=color, marker=".", linewidth=1.6)
        ring = {"markerfacecolor": "none", "markeredgecolor": color, "markersize": 10, "linestyle": "none"}
        axes.plot([*level.printed], [*level.printed.values()], marker="o", **ring)
    axes.set_xscale("log")
    axes.set_yscale("log")
    batches = sorted({batch for level in levels for batch in level.counted})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch", fontsize=9.5, color=INK)
    ends = [(level.name, level.counted[max(level.counted)], c) for level, c in zip(levels, _COLORS, strict=False)]
    label_ends(axes, ends)


def _draw_steps(axes: Axes, steps: Sequence[Step]) -> None:
    style_axes(axes)
    axes.set_title("3 bits, 2 % of large values, 256 images: GB", fontsize=9.5, color=INK, loc="left")
    rows = range(len(steps))
    kinds = (
        ("paper's Table 4", INK, "|", [step.paper for step in steps]),
        ("its formula", GREEN, "o", [step.formula for step in steps]),
        ("a step's peak, normalizations in few bits", BLUE, "o", [step.peak_norms for step in steps]),
        ("a step's peak, normalizations exact", VERMILION, "o", [step.peak for step in steps]),
    )
    for place, step in zip(rows, steps, strict=True):
        axes.plot([step.formula, step.peak], [place, place], color="#c9c9c9", linewidth=1, zorder=0)
    for name, color, marker, values in kinds:
        size = 14 if marker == "|" else 6
        axes.plot(values, rows, marker, color=color, markersize=size, markeredgewidth=1.6, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(rows, [step.network for step in steps])
    axes.set_ylim(len(steps) - 0.5, -0.5)
