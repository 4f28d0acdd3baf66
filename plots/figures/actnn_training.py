"""Trainings at ActNN's levels: loss curves, final loss of each seed, and memory kept for backward."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .style import CYCLE, GREY, INK, SAND, SAND_EDGE, style_axes


@dataclass(frozen=True)
class Variant:
    """The runs of one variant on one task, one per seed.

    Attributes:
        name: display name.
        losses: training losses of each seed after 1, 2, … steps, already smoothed if desired; all of the same length.
        validation_losses: of each seed, after the last step.
        kept: bytes kept for backward in one step.
    """

    name: str
    losses: Sequence[Sequence[float]]
    validation_losses: Sequence[float]
    kept: int


def plot_actnn_training(tasks: dict[str, Sequence[Variant]]) -> Figure:
    """Return a figure with a row of three panels for each task.

    Args:
        tasks: name -> variants, the baseline first; the same variants for all tasks.
    """
    figure = Figure(figsize=(12.6, 0.6 + 3.7 * len(tasks)), layout="constrained", facecolor="white")
    rows = figure.subplots(len(tasks), 3, width_ratios=(1.2, 1, 1), squeeze=False)
    for (name, variants), (falling, ending, keeping) in zip(tasks.items(), rows, strict=True):
        _draw_losses(falling, name, variants)
        _draw_validation(ending, variants)
        _draw_bytes(keeping, variants)
    figure.legend(
        *rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9.5
    )
    return figure


def _draw_losses(axes: Axes, name: str, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    axes.set_title(f"{name}: training loss, mean of the seeds", fontsize=9.5, color=INK)
    exact = np.asarray(variants[0].losses)
    steps = np.arange(1, exact.shape[1] + 1)
    label = f"{variants[0].name}, lowest to highest seed"
    axes.fill_between(
        steps, exact.min(0), exact.max(0), facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8, label=label
    )
    for index, variant in enumerate(variants):
        axes.plot(steps, np.mean(variant.losses, axis=0), color=_colour(index), linewidth=1.2, label=variant.name)
    axes.set_yscale("log")
    axes.set_xlim(0, len(steps))
    axes.set_xlabel("step", fontsize=10, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _draw_validation(axes: Axes, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    axes.grid(False, axis="y")
    axes.set_title(f"validation loss; area: {variants[0].name} ± 1 s.d.", fontsize=9.5, color=INK)
    exact = np.asarray(variants[0].validation_losses)
    deviation = exact.std(ddof=1) if len(exact) > 1 else 0.0
    axes.axvspan(exact.mean() - deviation, exact.mean() + deviation, facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8)
    places = _places(axes, variants)
    for losses in zip(*(variant.validation_losses for variant in variants), strict=True):
        axes.plot(losses, places, color=GREY, linewidth=0.8, alpha=0.6)
    for index, (place, variant) in enumerate(zip(places, variants, strict=True)):
        axes.plot(variant.validation_losses, [place] * len(exact), "o", color=_colour(index), markersize=4.5, zorder=3)
        mean = np.mean(variant.validation_losses)
        axes.plot(mean, place, "|", color=_colour(index), markersize=16, markeredgewidth=1.6)


def _draw_bytes(axes: Axes, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    axes.grid(False, axis="y")
    axes.set_title("kept for backward, MiB", fontsize=9.5, color=INK)
    for index, (place, variant) in enumerate(zip(_places(axes, variants), variants, strict=True)):
        axes.barh(place, variant.kept / 2**20, color=_colour(index), height=0.62)
        ratio = variants[0].kept / variant.kept
        label = f" {variant.kept / 2**20:.2f}" + (f"  ({ratio:.1f}× less)" if index else "")
        axes.text(variant.kept / 2**20, place, label, va="center", fontsize=8.5, color=INK)
    axes.set_xlim(0, 1.35 * max(variant.kept for variant in variants) / 2**20)


def _places(axes: Axes, variants: Sequence[Variant]) -> list[int]:
    """Assign a row to each variant, the first on top; return the rows."""
    places = list(range(len(variants)))
    axes.set_yticks(places, [variant.name for variant in variants], fontsize=8.5)
    axes.set_ylim(len(variants) - 0.4, -0.6)
    return places


def _colour(index: int) -> str:
    return (INK, *CYCLE)[index % (len(CYCLE) + 1)]
