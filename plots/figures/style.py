"""The style of all figures: colours distinguishable by colour-blind readers, a light grid, no frame.

Styles are set on the artists, never in matplotlib's global `rcParams`: making a figure has no side effects.
"""

from matplotlib.axes import Axes

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
