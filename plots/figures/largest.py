"""Throughput against batch, the largest networks as multiples of exact training's, and BLPA's batches and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from .style import CYCLE, INK, entitle, label_ends, style_axes

_EXACT = "exact"


@dataclass(frozen=True)
class Found:
    """The largest number that fits by one method.

    Attributes:
        largest: the number.
        speeds: (number, images a second) of the trials that fit.
    """

    largest: int
    speeds: Sequence[Sequence[float]]


def plot_largest(
    batches: Mapping[str, Found], scaled: Mapping[str, Mapping[str, Found]], blpa: Mapping[int, Mapping[str, Found]]
) -> Figure:
    """Return the figure.

    Args:
        batches: of a ResNet-152 by method.
        scaled: by dimension and method.
        blpa: batches of BLPA's networks by layers and method.
    """
    figure = Figure(figsize=(9.6, 6.8), layout="constrained", facecolor="white")
    entitle(figure, _message(batches))
    (first, second), (third, fourth) = figure.subplots(2, 2)
    colors = {name: INK if name == _EXACT else CYCLE[i - 1] for i, name in enumerate(batches)}
    _draw_speeds(first, batches, colors)
    _draw_scaled(second, scaled, colors)
    _draw_layers(third, {n: {m: f.largest for m, f in found.items()} for n, found in blpa.items()})
    third.set_title("BLPA: the largest batch", fontsize=9.5, loc="left")
    times = {n: {m: 1000 / f.speeds[-1][1] for m, f in found.items()} for n, found in blpa.items()}
    _draw_layers(fourth, times)
    fourth.set_title("BLPA: milliseconds an image, each at its largest batch", fontsize=9.5, loc="left")
    return figure


def _draw_speeds(axes: Axes, batches: Mapping[str, Found], colors: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_xscale("log", base=2)
    ends = []
    for name, found in batches.items():
        sizes, speeds = zip(*found.speeds, strict=True)
        axes.plot(sizes, speeds, color=colors[name], linewidth=1.5)
        axes.plot(sizes[-1], speeds[-1], "X", color=colors[name], markersize=7)
        ends.append((f"{name}, {found.largest}", speeds[-1], colors[name]))
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("batch; cross: the largest that fits")
    axes.set_title("ResNet-152: images a second", fontsize=9.5, loc="left")


def _draw_scaled(axes: Axes, scaled: Mapping[str, Mapping[str, Found]], colors: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.grid(False, axis="x")
    methods = [*dict.fromkeys(name for found in scaled.values() for name in found if name != _EXACT)]
    for i, name in enumerate(methods):
        for place, found in enumerate(scaled.values()):
            if name in found and _EXACT in found:
                x, times = place + 0.38 * (i - (len(methods) - 1) / 2), found[name].largest / found[_EXACT].largest
                axes.bar(x, times, 0.34, color=colors.get(name, CYCLE[i]))
                axes.text(x, times, f"{name}: {found[name].largest}", ha="center", va="bottom", size=8)
    names = [f"{d}\nexact: {found[_EXACT].largest if _EXACT in found else '?'}" for d, found in scaled.items()]
    axes.set_xticks(np.arange(len(scaled)), names)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_title("ResNet-152 at a fixed batch: times exact's", fontsize=9.5, loc="left")


def _draw_layers(axes: Axes, values: Mapping[int, Mapping[str, float]]) -> None:
    style_axes(axes)
    methods = [*dict.fromkeys(name for found in values.values() for name in found)]
    for i, name in enumerate(methods):
        points = [(layers, found[name]) for layers, found in values.items() if name in found]
        color = INK if name == _EXACT else CYCLE[i - 1]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, linewidth=1.5)
        axes.annotate(name, points[-1], (6, 0), textcoords="offset points", va="center", size=8.5, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.15)
    axes.set_xticks([*values], [*map(str, values)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("layers")


def _message(batches: Mapping[str, Found]) -> str:
    if _EXACT not in batches or len(batches) < 2:
        return "The largest that fits into a limited memory"
    name = max(batches, key=lambda each: batches[each].largest)
    times = batches[name].largest / batches[_EXACT].largest
    return f"In the same memory {name} trains a ResNet-152 on batches {times:.1f} times as large as exact training"
