"""Means with their intervals against a number, each line with its name beside its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from .style import INK, label_ends, style_axes


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        name: written beside its end.
        color: of the line and its name.
        points: x → (mean, half of the interval); an interval that is not finite is not drawn.
        dashed: for a line that compares with others of its colour.
    """

    name: str
    color: str
    points: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    dashed: bool = False


def draw_lines(
    axes: Axes, lines: Sequence[Line], x: str, title: str, *, scale: tuple[str, str] = ("linear", "linear")
) -> None:
    """Draw lines with intervals; those without points are left out.

    Args:
        axes: an empty panel.
        lines: six at most, or a reader cannot tell them apart.
        x: label of the abscissa, whose ticks are at the points.
        title: what the ordinate is.
        scale: of abscissa and ordinate: linear, log, or symlog, which is linear from -1 to 1.
    """
    style_axes(axes)
    drawn = [line for line in lines if line.points]
    for line in drawn:
        at = sorted(line.points)
        means, halves = zip(*(line.points[one] for one in at), strict=True)
        lengths = [half if half < float("inf") else 0.0 for half in halves]
        how = "o--" if line.dashed else "o-"
        axes.errorbar(at, means, lengths, fmt=how, color=line.color, label=line.name, markersize=3.5, elinewidth=1)
    axes.set_xscale(scale[0])
    axes.set_yscale(scale[1], **({"linthresh": 1} if scale[1] == "symlog" else {}))
    axes.set_xticks(sorted({one for line in drawn for one in line.points}))
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    label_ends(axes, [(line.name, line.points[max(line.points)][0], line.color) for line in drawn])
