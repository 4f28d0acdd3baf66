"""Training with inputs of layers in few bits: what is lost against bits, by how finely bits and ranges are chosen."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from .lines import Line, draw_lines
from .style import INK, entitle


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
