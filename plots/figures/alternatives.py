"""Ways to train with less memory: the time of a step against its peak; named are those that nothing beats.

One way beats another if its peak, time and error of the gradient are no larger, and not all equal. The exact step and
checkpointing are named in any case, and the table of the guide names all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, ORANGE, entitle, name_beside, style_axes

# Tasks of `fewbit bench alternatives`, a panel each.
PANELS = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT", "cnn": "ResNet-18"}
# What torch and others offer; all else is fewbit's.
_OTHERS = frozenset(
    (
        *("exact", "checkpointing", "selective checkpointing", "save_on_cpu", "float8, hooks", "compile"),
        *("compile, budget 0.5", "compile, budget 0.25", "compile, checkpointing", "compile, selective"),
        "compile, save_on_cpu",
    )
)
# What fewbit is held against: the first of them that was measured, for who compiles also checkpoints compiled.
_RIVALS = {"compile, checkpointing": "compiled checkpointing", "checkpointing": "checkpointing"}
_BARS = ("exact", *_RIVALS)
_LEAST = 3e-5  # errors below, as of another order of sums, are drawn as 0
_FAINT = 0.3
_MOST = 0.05  # the error up to which the title compares


@dataclass(frozen=True)
class Point:
    """A way to train: its name, and peak, time and error of the gradient relative to the exact step's."""

    name: str
    peak: float
    time: float
    error: float

    @property
    def label(self) -> str:
        """The name and the error."""
        return f"{self.name}, error {self.error:.2g}" if self.error else self.name

    @property
    def color(self) -> str:
        """Of the kind: others' ways, fewbit's, fewbit's in compiled code."""
        if self.name in _OTHERS:
            return GREY
        return ORANGE if self.name.startswith("compile") else BLUE

    @property
    def size(self) -> tuple[float, float, float]:
        """What is to be small."""
        return self.peak, self.time, self.error


def points_of(rows: Sequence[Mapping[str, Any]], task: str) -> list[Point]:
    """Return the ways of a task that did not fail."""
    own = [row for row in rows if row["task"] == task and not row["wrong"]]
    exact = next((row for row in own if row["way"] == "exact"), None)
    if exact is None:
        return []
    shares = [Point(r["way"], r["peak"] / exact["peak"], r["time"] / exact["time"], r["error"]) for r in own]
    return [p if p.error >= _LEAST else Point(p.name, p.peak, p.time, 0.0) for p in shares]


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats."""

    def is_beaten(point: Point) -> bool:
        others = (other.size for other in points if other.size != point.size)
        return any(all(a <= b for a, b in zip(other, point.size, strict=True)) for other in others)

    return [point for point in points if not is_beaten(point)]


def rival_of(points: Sequence[Point]) -> Point | None:
    """Return the strongest of the rivals that was measured; None if none was."""
    named = {point.name: point for point in points}
    return next((named[name] for name in _RIVALS if name in named), None)


def beside_checkpointing(points: Sequence[Point]) -> float | None:
    """Return the least time of fewbit's ways of a small error at the rival's peak or below, in parts of its time.

    None if there is neither.
    """
    bar = rival_of(points)
    if bar is None:
        return None
    ours = (p.time for p in points if p.name not in _OTHERS and p.peak <= bar.peak and p.error <= _MOST)
    least = min(ours, default=None)
    return None if least is None else least / bar.time


def plot_alternatives(rows: Sequence[Mapping[str, Any]], where: str) -> Figure:
    """Return a panel a model: each way a point at its peak and time, relative to the exact step's.

    Args:
        rows: of the report of `fewbit bench alternatives`.
        where: the machine.
    """
    figure = Figure(figsize=(13, 8.4), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 2).flatten()
    found = {task: points_of(rows, task) for task in PANELS}
    for axes, (task, title) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, found[task], title)
    kinds = {"exact, checkpointing, torch.compile, float8": GREY, "fewbit": BLUE, "fewbit, compiled": ORANGE}
    handles = [panels[0].plot([], [], "o", color=color, label=name)[0] for name, color in kinds.items()]
    faint = {"alpha": _FAINT, "markersize": 4, "label": "faint: another way is no worse in peak, time and error"}
    handles += panels[0].plot([], [], "o", color=GREY, **faint)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    entitle(figure, f"{_message([*found.values()])} ({where})")
    return figure


def _message(panels: Sequence[Sequence[Point]]) -> str:
    ratios = [ratio for points in panels if (ratio := beside_checkpointing(points)) is not None]
    if not ratios:
        return "The time of a step against its peak"
    low, high = (f"{ratio:.2f}".lstrip("0") for ratio in (min(ratios), max(ratios)))
    times = low if low == high else f"{low} to {high}"
    rivals = {_RIVALS[rival.name] for points in panels if (rival := rival_of(points)) is not None}
    rival = " or ".join(sorted(rivals, reverse=True))
    return f"At {rival}'s peak, few bits take {times} of its time, with errors up to {_MOST:g}"


def _panel(axes: Axes, points: Sequence[Point], title: str) -> None:
    style_axes(axes)
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel("peak of a step, of the exact one's", fontsize=9, color=INK)
    axes.set_ylabel("time of a step, of the exact one's", fontsize=9, color=INK)
    front = unbeaten(points)
    for point in points:
        size, alpha = (6, 1) if point in front else (4, _FAINT)
        axes.plot(point.peak, point.time, "o", color=point.color, markersize=size, alpha=alpha)
    named = sorted({*front, *(p for p in points if p.name in _BARS)}, key=lambda p: (p.time, p.name))
    axes.set_xlim(0, max([1.1, *(point.peak + 0.05 for point in points)]))
    name_beside(axes, [(p.label, p.peak, p.time) for p in named], [p.color for p in named])
