"""Ways to train with less memory: the error of the gradient against the peak of a step, its time in the names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, ORANGE, style_axes

# Tasks of `fewbit bench alternatives`, a panel each.
PANELS = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT", "cnn": "ResNet-18"}
# What torch and others offer; all else is fewbit's.
_OTHERS = frozenset(
    ("exact", "checkpointing", "save_on_cpu", "float8, hooks", "compile", "compile, budget 0.5", "compile, budget 0.25")
)
_LEAST = 3e-5  # errors below, as of another order of sums, are drawn as 0


@dataclass(frozen=True)
class Point:
    """A way to train: its name, and peak, time and error of the gradient relative to the exact step's."""

    name: str
    peak: float
    time: float
    error: float

    @property
    def label(self) -> str:
        """The name and the time."""
        return f"{self.name} ×{self.time:.2f}"

    @property
    def color(self) -> str:
        """Of the kind: others' ways, fewbit's, fewbit's in compiled code."""
        if self.name in _OTHERS:
            return GREY
        return ORANGE if self.name.startswith("compile") else BLUE


def points_of(rows: Sequence[Mapping[str, Any]], task: str) -> list[Point]:
    """Return the ways of a task that did not fail."""
    own = [row for row in rows if row["task"] == task and not row["wrong"]]
    exact = next((row for row in own if row["way"] == "exact"), None)
    if exact is None:
        return []
    shares = [Point(r["way"], r["peak"] / exact["peak"], r["time"] / exact["time"], r["error"]) for r in own]
    return [p if p.error >= _LEAST else Point(p.name, p.peak, p.time, 0.0) for p in shares]


def plot_alternatives(rows: Sequence[Mapping[str, Any]], where: str) -> Figure:
    """Return a panel a model: each way a point, named with its time; peak and error relative to the exact step's.

    Args:
        rows: of the report of `fewbit bench alternatives`.
        where: the machine.
    """
    figure = Figure(figsize=(13, 9), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 2).flatten()
    for axes, (task, title) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, points_of(rows, task), title)
    kinds = {"exact, checkpointing, torch.compile, float8": GREY, "fewbit": BLUE, "fewbit, compiled": ORANGE}
    handles = [panels[0].plot([], [], "o", color=color, label=name)[0] for name, color in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    title = "Less memory costs error, time (× the exact step's), or both"
    figure.suptitle(f"{title}; {where}", fontsize=11, color=INK)
    return figure


def _panel(axes: Axes, points: Sequence[Point], title: str) -> None:
    style_axes(axes)
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_yscale("symlog", linthresh=1e-3, linscale=0.6)
    axes.set_ylim(-2.5e-4, 1)
    axes.set_xlim(0, max([1.2, *(point.peak + 0.05 for point in points)]))
    axes.set_xlabel("peak of a step, of the exact one's", fontsize=9, color=INK)
    axes.set_ylabel("relative error of the gradient", fontsize=9, color=INK)
    for point in points:
        axes.plot(point.peak, point.error, "o", color=point.color, markersize=5)
    rounded = sorted((point for point in points if point.error), key=lambda point: (point.error, -point.peak))
    for point, height in zip(rounded, _heights(axes, rounded), strict=True):
        line = {"arrowstyle": "-", "color": point.color, "linewidth": 0.4, "shrinkB": 3, "relpos": (0, 0.5)}
        place = {"xytext": (1.02, height), "textcoords": axes.transAxes, "va": "center", "arrowprops": line}
        axes.annotate(point.label, (point.peak, point.error), fontsize=8, color=INK, **place)
    last = -1.0
    for point in sorted((point for point in points if not point.error), key=lambda point: point.peak):
        last = max(point.peak, last + 0.04)
        place = {"xytext": (last + 0.01, 1.5e-4), "rotation": 60, "rotation_mode": "anchor"}
        axes.annotate(point.label, (point.peak, 0), fontsize=8, color=INK, **place)


def _heights(axes: Axes, points: Sequence[Point], least: float = 0.05) -> list[float]:
    """Return heights, in shares of the axes, at which names of points of rising errors do not lie on one another."""
    own = [float((axes.transData + axes.transAxes.inverted()).transform((0, p.error))[1]) for p in points]
    heights: list[float] = []
    for height in own:
        heights.append(max(height, heights[-1] + least) if heights else height)
    over = max(0.0, heights[-1] - 1) if heights else 0.0
    highest = 1.0
    for i in range(len(heights) - 1, -1, -1):
        heights[i] = min(heights[i] - (over if heights[i] > own[i] else 0), highest)
        highest = heights[i] - least
    return heights
