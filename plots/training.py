"""Loss curves of several runs: how they fall, and how far they are from the first of them.

The curves of a good few-bit table lie on top of the exact one; so a second panel draws the differences alone. Where
there are several seeds, the spread of the exact runs lies behind: what stays in it, another seed does as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from .style import CYCLE, GREY, INK, SAND, SAND_EDGE, style_axes


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        name: for the legend.
        losses: training loss after 1, 2, … steps, smoothed as is wished; as many in every curve.
        validation_loss: after the last step; named in the legend.
    """

    name: str
    losses: Sequence[float]
    validation_loss: float


def plot_training(curves: Sequence[Curve], unigram_entropy: float) -> Figure:
    """Return a figure of two panels over the steps.

    Args:
        curves: the first is what the others are compared with; at least one.
        unigram_entropy: a yardstick, drawn as a horizontal line; in the unit of the losses, nats a character.
    """
    figure = Figure(figsize=(9.2, 3.8), layout="constrained", facecolor="white")
    falling, differing = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_losses(falling, curves, unigram_entropy)
    _draw_differences(differing, curves)
    for axes in (falling, differing):
        axes.set_xlabel("step", fontsize=10, color=INK)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.legend(
        *falling.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9.5
    )
    return figure


@dataclass(frozen=True)
class Seeds:
    """The runs of one variant, one a seed.

    Attributes:
        name: for the legend.
        losses: training losses of each seed after 1, 2, … steps, smoothed as is wished; as many in all.
        validation_losses: of each seed, after the last step.
    """

    name: str
    losses: Sequence[Sequence[float]]
    validation_losses: Sequence[float]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Training loss at each step, averaged over the seeds."""
        return np.mean(self.losses, axis=0)


def plot_seeds(variants: Sequence[Seeds], unigram_entropy: float) -> Figure:
    """Return a figure of three panels: losses, differences from the first variant, validation losses.

    Args:
        variants: the first is what the others are compared with, and makes the band; at least one, the seeds of all the
            same, in the same order.
        unigram_entropy: as in `plot_training`.
    """
    figure = Figure(figsize=(12.4, 4.1), layout="constrained", facecolor="white")
    falling, differing, validating = figure.subplots(1, 3, width_ratios=(1, 1.15, 0.85))
    exact = variants[0]
    _draw_means(falling, variants, unigram_entropy)
    style_axes(differing)
    differing.set_title(f"training loss less the mean of {exact.name}", fontsize=9.5, color=INK)
    _draw_band(differing, exact, exact.mean)
    for index, variant in enumerate(variants):
        _draw_mean(differing, variant, variant.mean - exact.mean, index)
    for axes in (falling, differing):
        axes.set_xlabel("step", fontsize=10, color=INK)
        axes.set_xlim(0, len(exact.mean))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _draw_validation(validating, variants)
    figure.legend(
        *falling.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9.5
    )
    return figure


def _draw_means(axes: Axes, variants: Sequence[Seeds], unigram_entropy: float) -> None:
    style_axes(axes)
    axes.set_title("training loss", fontsize=9.5, color=INK)
    axes.set_ylabel("nats a character", fontsize=10, color=INK)
    axes.axhline(unigram_entropy, color=GREY, linewidth=1.2, linestyle=":", label="unigram entropy")
    _draw_band(axes, variants[0], np.zeros(1))
    for index, variant in enumerate(variants):
        _draw_mean(axes, variant, variant.mean, index)


def _draw_band(axes: Axes, exact: Seeds, origin: NDArray[np.float64]) -> None:
    """Fill what lies between the lowest and the highest run at every step, less `origin`."""
    lowest, highest = np.min(exact.losses, axis=0) - origin, np.max(exact.losses, axis=0) - origin
    label = f"{exact.name}, lowest to highest of {len(exact.losses)} seeds"
    steps = np.arange(1, len(lowest) + 1)
    axes.fill_between(steps, lowest, highest, facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8, label=label)


def _draw_mean(axes: Axes, variant: Seeds, values: NDArray[np.float64], index: int) -> None:
    steps = np.arange(1, len(values) + 1)
    axes.plot(steps, values, color=_colour(index), linewidth=1.3, label=f"{variant.name}, mean")


def _draw_validation(axes: Axes, variants: Sequence[Seeds]) -> None:
    """Draw a point a seed and a bar at the mean; a line joins the runs of a seed, behind is exact ± one deviation."""
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.set_title("validation loss; area: exact ± 1 s.d.", fontsize=9.5, color=INK)
    exact = np.asarray(variants[0].validation_losses)
    deviation = exact.std(ddof=1) if len(exact) > 1 else 0.0
    lowest, highest = exact.mean() - deviation, exact.mean() + deviation
    axes.axhspan(lowest, highest, facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8)
    places = np.arange(len(variants))
    for losses in zip(*(variant.validation_losses for variant in variants), strict=True):
        axes.plot(places, losses, color=GREY, linewidth=0.8, alpha=0.6)
    for place, variant in zip(places, variants, strict=True):
        colour = _colour(int(place))
        axes.plot([place] * len(exact), variant.validation_losses, "o", color=colour, markersize=5, zorder=3)
        axes.plot(place, np.mean(variant.validation_losses), "_", color=colour, markersize=22, markeredgewidth=1.6)
    axes.set_xticks(places, [variant.name.replace(", ", ",\n") for variant in variants])
    axes.set_xlim(-0.5, len(variants) - 0.5)


def _draw_losses(axes: Axes, curves: Sequence[Curve], unigram_entropy: float) -> None:
    style_axes(axes)
    axes.set_title("training loss", fontsize=9.5, color=INK)
    axes.set_ylabel("nats a character", fontsize=10, color=INK)
    axes.axhline(unigram_entropy, color=GREY, linewidth=1.2, linestyle="--", label="unigram entropy")
    for index, curve in enumerate(curves):
        steps = np.arange(1, len(curve.losses) + 1)
        label = f"{curve.name} (validation {curve.validation_loss:.3f})"
        axes.plot(steps, curve.losses, color=_colour(index), linewidth=1.3, label=label)


def _draw_differences(axes: Axes, curves: Sequence[Curve]) -> None:
    style_axes(axes)
    axes.set_title(f"difference in training loss from {curves[0].name}", fontsize=9.5, color=INK)
    reference = np.asarray(curves[0].losses)
    for index, curve in enumerate(curves):
        differences = np.asarray(curve.losses) - reference
        axes.plot(np.arange(1, len(differences) + 1), differences, color=_colour(index), linewidth=1.3)


def _colour(index: int) -> str:
    return (INK, *CYCLE)[index % (len(CYCLE) + 1)]
