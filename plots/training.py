"""Loss curves of several runs: how they fall, and how far they are from the first of them.

The curves of a good few-bit table lie on top of the exact one; so a second panel draws the differences alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .style import CYCLE, GREY, INK, style_axes


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
