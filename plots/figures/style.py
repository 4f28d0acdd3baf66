"""How every figure looks: colours that colour-blind readers tell apart, a light grid, no frame.

Styles are set on the artists, never in matplotlib's global `rcParams`: making a figure changes nothing else.
"""

from matplotlib.axes import Axes

# Okabe & Ito (2008), "Color Universal Design"; a grey in place of the yellow, which is lost on white.
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
SAND, SAND_EDGE = "#f5ecd0", "#dccb93"  # an area behind everything else
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")

_GRID = "#e4e4e4"
_FRAME = "#9a9a9a"


def shortened(text: str, width: int) -> str:
    """Return `text`, or as much of its beginning as fits in `width` characters and an ellipsis."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def style_axes(axes: Axes) -> None:
    """Give `axes` a light grid behind the data, quiet ticks, and a frame on the left and below only."""
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FRAME)
        axes.spines[side].set_linewidth(0.8)
    axes.tick_params(which="both", color=_FRAME, labelcolor=INK, labelsize=9, width=0.8, length=3)
    axes.tick_params(which="minor", length=0)
