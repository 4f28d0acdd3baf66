"""Trainings at ActNN's levels: what each loses to exact training, by step and at the end, and what it keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..intervals import holm, interval, verdict
from .style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, label_ends, style_axes

# The first variants are lines, each of its colour; what comes after them is compared with them at the end alone.
_LINES = (INK, BLUE, GREEN, ORANGE, VERMILION)
_OTHERS = INK


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


def plot_actnn_training(tasks: Mapping[str, Sequence[Variant]]) -> Figure:
    """Return a figure with a row of three panels for each task.

    Args:
        tasks: name -> variants, the baseline first; the same variants and seeds for all tasks.
    """
    figure = Figure(figsize=(13.4, 0.9 + 3.5 * len(tasks)), layout="constrained", facecolor="white")
    entitle(figure, message(tasks))
    rows = figure.subplots(len(tasks), 3, width_ratios=(1.2, 1, 1), squeeze=False)
    for (name, variants), (falling, ending, keeping) in zip(tasks.items(), rows, strict=True):
        _draw_losses(falling, name, variants)
        _draw_validation(ending, variants)
        _draw_bytes(keeping, variants)
    return figure


def message(tasks: Mapping[str, Sequence[Variant]]) -> str:
    """Return which lines end as exact training on every task, which above it beyond chance on one, and the others.

    Above: on some task the 95 % interval leaves out zero after Holm's correction. As exact: on every task it lies
    within `MARGIN`; these are named with how much less they keep.
    """
    exact, *others = next(iter(tasks.values()))[: len(_LINES)]
    gaps = [[interval(_gaps(own[0], own[i]).tolist()) for own in tasks.values()] for i in range(1, len(others) + 1)]
    differs = iter(holm([gap for own in gaps for gap in own]))
    ends: dict[str, list[str]] = {f"Ends as {exact.name} training": [], "above it beyond chance": [], "undecided": []}
    equal, above, undecided = ends.values()
    for i, (variant, own) in enumerate(zip(others, gaps, strict=True), 1):
        beyond = [next(differs) and gap.mean > 0 for gap in own]
        if all(verdict(gap) == "equal" for gap in own):
            times = sorted(variants[0].kept / variants[i].kept for variants in tasks.values())
            less = " to ".join(dict.fromkeys(f"{one:.0f}" for one in (times[0], times[-1])))
            equal.append(f"{variant.name} ({less}× less memory)")
        else:
            (above if any(beyond) else undecided).append(variant.name)
    return "; ".join(f"{where}: {' · '.join(names)}" for where, names in ends.items() if names)


def _gaps(exact: Variant, variant: Variant) -> NDArray[np.float64]:
    """Return validation losses less exact's, by seed."""
    return np.subtract(variant.validation_losses, exact.validation_losses)


def _draw_losses(axes: Axes, name: str, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    exact = np.asarray(variants[0].losses)
    axes.set_title(
        f"{name}: training loss less {variants[0].name}'s, mean of seeds", fontsize=9.5, color=INK, loc="left"
    )
    steps = np.arange(1, exact.shape[1] + 1)
    ends = []
    for variant, colour in zip(variants, _LINES, strict=False):
        values = (np.asarray(variant.losses) - exact).mean(0)
        axes.plot(steps, values, color=colour, linewidth=1.5, label=variant.name)
        ends.append((variant.name, float(values[-1]), colour))
    axes.set_xlim(0, len(steps))
    axes.set_xlabel("step", fontsize=10, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    label_ends(axes, ends, 0.07)


def _draw_validation(axes: Axes, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    axes.grid(False, axis="y")
    exact, *others = variants
    axes.set_title(f"validation loss less {exact.name}'s; bars: 95 % intervals", fontsize=9.5, color=INK, loc="left")
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, variant in zip(_places(axes, others), others, strict=True):
        gaps, colour = _gaps(exact, variant), _colour(place + 1)
        axes.plot(gaps, [place] * len(gaps), "o", color=colour, markersize=4.5, alpha=0.7)
        if len(gaps) > 1:
            found = interval(gaps.tolist())
            axes.errorbar(found.mean, place, xerr=found.half, color=colour, capsize=4, linewidth=1.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _draw_bytes(axes: Axes, variants: Sequence[Variant]) -> None:
    style_axes(axes)
    axes.grid(False, axis="y")
    axes.set_title("kept for backward, MiB", fontsize=9.5, color=INK, loc="left")
    for place, variant in zip(_places(axes, variants), variants, strict=True):
        axes.barh(place, variant.kept / 2**20, color=_colour(place), height=0.62)
        ratio = variants[0].kept / variant.kept
        label = f" {variant.kept / 2**20:.2f}" + (f"  ({ratio:.1f}× less)" if place else "")
        axes.text(variant.kept / 2**20, place, label, va="center", fontsize=8.5, color=INK)
    axes.set_xlim(0, 1.35 * max(variant.kept for variant in variants) / 2**20)


def _places(axes: Axes, variants: Sequence[Variant]) -> list[int]:
    """Assign a row to each variant, the first on top; return the rows."""
    places = list(range(len(variants)))
    axes.set_yticks(places, [variant.name for variant in variants], fontsize=8.5)
    axes.set_ylim(len(variants) - 0.4, -0.6)
    return places


def _colour(index: int) -> str:
    return _LINES[index] if index < len(_LINES) else _OTHERS
