"""Trainings beside exact training: how far each way's training loss is from exact's over the steps, and where it ends.

A line is the mean of the seeds, its band from the least to the greatest of them. The axis of losses is linear between
± .02 and logarithmic beyond, since the first steps differ a hundred times as much as the last.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure

from ..intervals import MARGIN, interval
from .style import GREY, INK, entitle, label_ends, style_axes

_COLOURS = ("#9a9a9a", "#1b6ca8", "#2a9d8f", "#e9a23b", "#d1495b", "#7b5ea7", "#5c4033")


def plot_curves_apart(
    curves: Mapping[str, Sequence[Sequence[float]]], steps: int, gaps: Mapping[str, Sequence[float]]
) -> Figure:
    """Return the figure of trainings beside exact ones.

    Args:
        curves: way → for each seed the training loss less exact's, at points evenly spread over the steps.
        steps: of a training.
        gaps: way → for each seed the validation loss less exact's, after the last step.
    """
    figure = Figure(figsize=(10.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    entitle(figure, "Training loss less exact training's, and where validation ends")
    ends = []
    for colour, (way, seeds) in zip(_COLOURS, curves.items(), strict=False):
        at = [steps * (i + 1) / len(seeds[0]) for i in range(len(seeds[0]))]
        columns = list(zip(*seeds, strict=True))
        means = [fmean(column) for column in columns]
        left.fill_between(at, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.18, linewidth=0)
        left.plot(at, means, color=colour, linewidth=1.4)
        ends.append((way, means[-1], colour))
    left.set_yscale("symlog", linthresh=MARGIN)
    left.set_xlim(0, steps)
    left.set_xlabel("step", fontsize=8.5)
    left.set_ylabel("nats a character", fontsize=8.5)
    for axes in (left, right):
        style_axes(axes)
    left.axhline(0, color=GREY, linewidth=1)
    label_ends(left, ends)
    right.axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.15, linewidth=0)
    for height, values in enumerate(gaps.values()):
        colour, found = _COLOURS[height % len(_COLOURS)], interval(values)
        right.plot(values, [height] * len(values), "o", color=GREY, markersize=3.5, alpha=0.7)
        half = found.half if len(values) > 1 else 0
        right.errorbar(found.mean, height, xerr=half, fmt="o", color=colour, markersize=5, linewidth=1.6)
    right.set_yticks(range(len(gaps)), list(gaps))
    right.invert_yaxis()
    seeds = max(map(len, gaps.values()), default=0)
    right.set_title(f"validation loss less exact's, {seeds} seeds", fontsize=9.5, color=INK, loc="left")
    return figure
