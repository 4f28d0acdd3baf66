"""Loss curves of several runs, and their differences from exact training.

The curves of a good few-bit table coincide with the exact one; so a second panel draws the differences from it alone,
over the range of several exact runs: a difference within it is no larger than one due to other initial weights.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from .hooks_training import losses_message
from .style import CYCLE, GREY, INK, SAND, SAND_EDGE, entitle, label_ends, style_axes


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        name: its label.
        losses: training loss after 1, 2, … steps, already smoothed if desired; the same length for all curves.
    """

    name: str
    losses: Sequence[float]


def plot_training(exact: Sequence[Sequence[float]], curves: Sequence[Curve], unigram_entropy: float) -> Figure:
    """Return a figure of two panels over the steps: the losses, and the difference of each curve from the exact runs.

    Args:
        exact: losses of exact runs; their range is the band. The first, from the weights of the curves, is drawn in the
            left panel and is the baseline of the comparison. At least one; a band takes two.
        curves: the runs to compare, five at most for a reader to tell them apart; each with as many losses.
        unigram_entropy: a reference, drawn as a horizontal line; in the unit of the losses, nats per character.
    """
    figure = Figure(figsize=(10.2, 4.2), layout="constrained", facecolor="white")
    falling, differing = figure.subplots(1, 2, width_ratios=(1, 1.15))
    runs = np.asarray(exact, dtype=np.float64)
    entitle(figure, message(runs, curves))
    _draw_losses(falling, runs[0], curves, unigram_entropy)
    _draw_differences(differing, runs, curves)
    for axes in (falling, differing):
        axes.set_xlabel("step", fontsize=10, color=INK)
        axes.set_xlim(0, runs.shape[1] * 1.001)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def message(exact: NDArray[np.float64], curves: Sequence[Curve]) -> str:
    """Return the figure's message: which curves end, over the last tenth of the steps, in the range of exact runs."""
    if len(exact) < 2 or not curves:
        return "Training loss: no band to compare with few bits"
    last = max(1, exact.shape[1] // 10)
    ends = exact[:, -last:].mean(1)
    inside, outside = [], []
    for curve in curves:
        end = float(np.mean(curve.losses[-last:]))
        (inside if ends.min() <= end <= ends.max() else outside).append(curve.name)
    parts = [f"{_listed(names)} {where}" for names, where in ((inside, "inside"), (outside, "outside")) if names]
    return f"{'; '.join(parts)} the range of {len(exact)} exact runs at the end of training"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True)
class Seeds:
    """The runs of one variant, one per seed.

    Attributes:
        name: name in the legend.
        losses: training losses of each seed after 1, 2, … steps, already smoothed if desired; all of the same length.
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
        variants: the first is the baseline, and makes the band; at least one, all with the same seeds in the same
            order.
        unigram_entropy: as in `plot_training`.
    """
    figure = Figure(figsize=(12.4, 4.1), layout="constrained", facecolor="white")
    falling, differing, validating = figure.subplots(1, 3, width_ratios=(1, 1.15, 0.85))
    exact = variants[0]
    entitle(figure, seeds_message(variants))
    _draw_means(falling, variants, unigram_entropy)
    style_axes(differing)
    title = f"less the mean of {exact.name}; area: its {len(exact.losses)} seeds"
    differing.set_title(title, fontsize=9.5, color=INK, loc="left")
    _draw_band(differing, exact, exact.mean)
    for index, variant in enumerate(variants):
        _draw_mean(differing, variant, variant.mean - exact.mean, index)
    for axes in (falling, differing):
        axes.set_xlabel("step", fontsize=10, color=INK)
        axes.set_xlim(0, len(exact.mean))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ends = [(v.name, float(v.mean[-1] - exact.mean[-1]), _colour(i)) for i, v in enumerate(variants)]
    label_ends(differing, ends, 0.075)
    _draw_validation(validating, variants)
    return figure


def seeds_message(variants: Sequence[Seeds]) -> str:
    """Return which variants' validation loss is above the first one's beyond chance, paired by seed."""
    exact, *others = variants
    if len(exact.validation_losses) < 2 or not others:
        return "Validation loss: nothing to compare"
    return losses_message({v.name: np.subtract(v.validation_losses, exact.validation_losses).tolist() for v in others})


def _draw_means(axes: Axes, variants: Sequence[Seeds], unigram_entropy: float) -> None:
    style_axes(axes)
    axes.set_title("training loss, nats a character", fontsize=9.5, color=INK, loc="left")
    _draw_entropy(axes, unigram_entropy)
    _draw_band(axes, variants[0], np.zeros(1))
    for index, variant in enumerate(variants):
        _draw_mean(axes, variant, variant.mean, index)


def _draw_band(axes: Axes, exact: Seeds, origin: NDArray[np.float64]) -> None:
    """Fill the range between the lowest and the highest run at every step, minus `origin`."""
    lowest, highest = np.min(exact.losses, axis=0) - origin, np.max(exact.losses, axis=0) - origin
    steps = np.arange(1, len(lowest) + 1)
    axes.fill_between(steps, lowest, highest, facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8)


def _draw_mean(axes: Axes, variant: Seeds, values: NDArray[np.float64], index: int) -> None:
    steps = np.arange(1, len(values) + 1)
    axes.plot(steps, values, color=_colour(index), linewidth=1.3, label=f"{variant.name}, mean")


def _draw_validation(axes: Axes, variants: Sequence[Seeds]) -> None:
    """Draw a point per seed and a bar at the mean; a line joins the runs of a seed; the band is exact ± 1 deviation."""
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.set_title("validation loss; area: exact ± its deviation", fontsize=9.5, color=INK, loc="left")
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
    axes.set_xticks(places, [textwrap.fill(variant.name, 8) for variant in variants])
    axes.set_xlim(-0.5, len(variants) - 0.5)


def _draw_losses(axes: Axes, exact: NDArray[np.float64], curves: Sequence[Curve], unigram_entropy: float) -> None:
    style_axes(axes)
    axes.set_title("training loss, nats a character", fontsize=9.5, color=INK, loc="left")
    _draw_entropy(axes, unigram_entropy)
    steps = np.arange(1, len(exact) + 1)
    lines = [("exact", exact, INK), *((c.name, np.asarray(c.losses), _colour(i)) for i, c in enumerate(curves, 1))]
    for name, losses, colour in lines:
        axes.plot(steps, losses, color=colour, linewidth=1.3, label=name)
    label_ends(axes, [(name, float(losses[-1]), colour) for name, losses, colour in lines])


def _draw_entropy(axes: Axes, unigram_entropy: float) -> None:
    axes.axhline(unigram_entropy, color=GREY, linewidth=1.2, linestyle="--")
    axes.annotate(
        *("character frequencies alone", (1, unigram_entropy)),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=GREY,
    )


def _draw_differences(axes: Axes, exact: NDArray[np.float64], curves: Sequence[Curve]) -> None:
    """Draw losses less those of the first exact run, whose weights and batches the curves have; others' as an area."""
    style_axes(axes)
    count = len(exact)
    axes.set_title("the same, less exact training from the same weights", fontsize=9.5, color=INK, loc="left")
    steps = np.arange(1, exact.shape[1] + 1)
    low, high = exact.min(0) - exact[0], exact.max(0) - exact[0]
    axes.fill_between(steps, low, high, facecolor=SAND, edgecolor=SAND_EDGE, linewidth=0.8)
    axes.axhline(0, color=INK, linewidth=0.8)
    lines = [(curve.name, np.asarray(curve.losses) - exact[0], _colour(i)) for i, curve in enumerate(curves, 1)]
    for name, values, colour in lines:
        axes.plot(steps, values, color=colour, linewidth=1.3, label=name)
    if count > 1:
        # The first steps, in which other weights are far apart, would flatten the rest.
        shown = np.concatenate([part[len(steps) // 10 :] for part in (low, high, *(values for _, values, _ in lines))])
        room = 0.15 * float(np.ptp(shown)) or 1.0
        axes.set_ylim(float(shown.min()) - room, float(shown.max()) + room)
        axes.annotate(
            *(f"area: range of {count} exact runs, {count - 1} of them from other weights", (0.98, 0.03)),
            xycoords="axes fraction",
            ha="right",
            fontsize=9,
            color=INK,
        )
    label_ends(axes, [(name, float(values[-1]), colour) for name, values, colour in lines])


def _colour(index: int) -> str:
    return (INK, *CYCLE)[index % (len(CYCLE) + 1)]
