"""A row for each way to save activations: its accuracy less exact's on the left, the bytes kept on the right."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, VERMILION, entitle, style_axes


@dataclass(frozen=True)
class Way:
    """A way to save activations.

    Attributes:
        name: display name.
        mean, half: of the accuracy less exact's, and half its interval's width.
        tasks: the mean of each task.
        kept: bytes kept, as a share of exact's.
    """

    name: str
    mean: float
    half: float
    tasks: Mapping[str, float]
    kept: float

    @property
    def loses(self) -> bool:
        """Whether the interval lies below zero."""
        return self.mean < -self.half


def plot_finetuning(ways: list[Way]) -> Figure:
    """Return a figure with a row for each way, the first on top."""
    figure = Figure(figsize=(8.4, 1.3 + 0.27 * len(ways)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes in (left, right):
        style_axes(axes)
    left.axvline(0, color=INK, linewidth=0.8)
    for row, way in enumerate(ways):
        color = VERMILION if way.loses else BLUE
        left.plot([100 * gap for gap in way.tasks.values()], [row] * len(way.tasks), "|", color=GREY, markersize=7)
        left.errorbar(100 * way.mean, row, xerr=100 * way.half, fmt="o", color=color, markersize=5, capsize=3)
        right.barh(row, way.kept, 0.6, color=color)
        right.text(way.kept + 0.015, row, f"{way.kept:.2f}", va="center", size=8)
    left.set_yticks(range(len(ways)), [way.name for way in ways])
    left.invert_yaxis()
    left.set_xlabel("test accuracy less exact's, in points;\ndot: mean of all tasks and seeds, stroke: of one task")
    right.set_xlabel("bytes kept from forward to backward,\nas a share of exact training's")
    right.set_xlim(0, 1.1)
    lost = sum(way.loses for way in ways)
    least = min(ways, key=lambda way: way.kept)
    entitle(
        figure,
        f"{lost or 'None'} of {len(ways)} ways lose accuracy beyond chance; "
        f"{least.name} keeps least, at {100 * least.mean:+.1f} points",
    )
    return figure
