"""The style of all figures: colours distinguishable by colour-blind readers, a light grid, no frame.

Styles are set on the artists, never in matplotlib's global `rcParams`: making a figure has no side effects.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito (2008), "Color Universal Design"; grey replaces yellow, which is hard to see on white.
INK, BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, GREY = (
    "#1a1a1a",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#7f7f7f",
)
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, INK, GREY)
SAND, SAND_EDGE = "#f5ecd0", "#dccb93"  # the area behind everything else
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")

_GRID = "#e4e4e4"
_FRAME = "#9a9a9a"


def shortened(text: str, width: int) -> str:
    """Return `text`, cut to `width` characters with an ellipsis if it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def entitle(figure: Figure, message: str) -> None:
    """Write what the figure shows above it, from its left edge."""
    figure.suptitle(message, fontsize=12, color=INK, x=0.01, ha="left", fontweight="bold")


def style_axes(axes: Axes) -> None:
    """Give `axes` a light grid behind the data, inconspicuous ticks, and only the left and bottom spines."""
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FRAME)
        axes.spines[side].set_linewidth(0.8)
    axes.tick_params(which="both", color=_FRAME, labelcolor=INK, labelsize=9, width=0.8, length=3)
    axes.tick_params(which="minor", length=0)


def heights_apart(axes: Axes, values: Sequence[float], least: float) -> list[float]:
    """Return heights, in shares of the axes, at which names of rising values do not lie on one another.

    Args:
        axes: with final limits and linear or logarithmic scales.
        values: rising.
        least: distance of two names.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    axes.get_ylim()  # settles the limits that the transformation uses
    heights: list[float] = []
    for value in values:
        height = float(to_axes.transform((left, value))[1])
        heights.append(max(height, heights[-1] + least) if heights else height)
    top = 0.97
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - least
    return heights


def name_beside(axes: Axes, points: Sequence[tuple[str, float, float]], colors: Sequence[str] = ()) -> None:
    """Write names to the right of the axes, whose limits are final, with a thin line from each to its point.

    Args:
        axes: with linear or logarithmic scales.
        points: (name, x, y), by rising y.
        colors: of the lines; by default grey.
    """
    heights = heights_apart(axes, [y for _, _, y in points], 0.06)
    for (name, x, y), height, color in zip(points, heights, colors or [GREY] * len(points), strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkB": 3, "relpos": (0, 0.5)}
        place = {"xytext": (1.02, height), "textcoords": axes.transAxes, "va": "center", "arrowprops": line}
        axes.annotate(name, (x, y), fontsize=8.5, color=INK, **place)


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, str]], least: float = 0.055) -> None:
    """Write names to the right of the axes, whose limits are final, each in its colour and beside its line's end.

    Args:
        axes: with linear or logarithmic scales.
        ends: (name, value of the line's end, colour).
        least: distance of two names, in heights of the axes.
    """
    ordered = sorted(ends, key=lambda end: end[1])
    heights = heights_apart(axes, [value for _, value, _ in ordered], least)
    for (name, _, colour), height in zip(ordered, heights, strict=True):
        axes.annotate(
            *(name, (1, height)),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )
