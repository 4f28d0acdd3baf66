"""A plan: memory through the step by kind, and the frontier of error against memory with the chosen point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, name_beside, style_axes

_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Memory:
    """Memory at moments of a step, in bytes.

    Attributes:
        fixed: parameters and the optimizer's state.
        kinds: name of a kind of memory -> bytes at each moment, drawn one upon the other.
        exact: all of the step that the plan is for, with everything saved exactly.
        backward: the moment at which the backward pass begins.
        limit: the memory that the plan was made for, or None.
        exact_peak: of the step as it is, drawn where it is another than that of `exact`: in chunks, tiles, or compiled.
    """

    fixed: int
    kinds: Mapping[str, Sequence[int]]
    exact: Sequence[int]
    backward: int
    limit: float | None
    exact_peak: int


@dataclass(frozen=True)
class Way:
    """A way to train: its name, peak in bytes, and relative error of the gradient."""

    name: str
    memory: int
    error: float


def plot_plan(memory: Memory, ways: Sequence[Way], chosen: Way, title: str) -> Figure:
    """Return memory through the step, and beside it, if there are `ways`, error against memory."""
    figure = Figure(figsize=(11 if ways else 6.5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if ways else 1, squeeze=False)[0]
    figure.suptitle(title, fontsize=10, color=INK)
    _plot_memory(axes[0], memory)
    if ways:
        _plot_frontier(axes[1], ways, chosen)
    return figure


def _unit(most: float) -> tuple[float, str]:
    return (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")


def _plot_memory(axes: Axes, memory: Memory) -> None:
    style_axes(axes)
    unit, name = _unit(max(memory.exact_peak, memory.fixed + max(memory.exact)))
    moments = range(len(memory.exact))
    layers = {"parameters, optimizer": [memory.fixed] * len(memory.exact), **memory.kinds}
    scaled = [[size / unit for size in sizes] for sizes in layers.values()]
    axes.stackplot(moments, *scaled, labels=list(layers), colors=(GREY, ORANGE, BLUE, SKY), alpha=0.85, linewidth=0)
    exact = [(memory.fixed + size) / unit for size in memory.exact]
    is_changed = abs(memory.exact_peak / unit - max(exact)) > 0.01 * max(exact)  # 400 moments have not every byte
    axes.plot(moments, exact, color=INK, linewidth=1, label="this step, saved exactly" if is_changed else "exact")
    if is_changed:
        axes.axhline(memory.exact_peak / unit, color=INK, linewidth=1, linestyle=":", label="peak of the exact step")
    if memory.limit is not None:
        axes.axhline(memory.limit / unit, color=VERMILION, linewidth=1, linestyle="--", label="limit")
    axes.axvline(memory.backward, color=GREY, linewidth=0.7, linestyle=":")
    axes.set_xticks([0, memory.backward], ["forward", "backward"])
    axes.set_ylabel(name, fontsize=9, color=INK)
    axes.set_ylim(0)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)


def _plot_frontier(axes: Axes, ways: Sequence[Way], chosen: Way) -> None:
    style_axes(axes)
    unit, name = _unit(max(way.memory for way in ways))
    # Plans weigh time too, so one for more memory may err by more, in less time; the one for less memory fits there.
    plans = sorted((way.memory / unit, way.error) for way in ways if way.name == "plan")
    least = np.minimum.accumulate([error for _, error in plans])
    sizes = [size for size, _ in plans]
    axes.plot(sizes, least, color=BLUE, marker="o", markersize=3, linewidth=1.2, label="best plan within")
    # Ways that err alike, as all exact ones do, are named from the right one up, so that no two lines cross.
    others = sorted((way for way in ways if way.name != "plan"), key=lambda way: (way.error, -way.memory))
    for way in others:
        marker, color = ("s", PURPLE) if way.name.endswith("bits") else ("D", GREEN)
        axes.plot(way.memory / unit, way.error, marker, color=color)
    axes.plot(chosen.memory / unit, chosen.error, "*", color=VERMILION, markersize=13, label="chosen")
    errors = [way.error for way in ways if way.error > 0]
    axes.set_yscale("symlog", linthresh=min(errors, default=0.01) / 2)
    axes.set_xlabel(f"peak, {name}", fontsize=9, color=INK)
    axes.set_ylabel("relative error of the gradient", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False)
    name_beside(axes, [(way.name, way.memory / unit, way.error) for way in others])
