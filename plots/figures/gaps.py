"""The gaps of trainings to exact ones: a panel a model, a row a way, a point a seed, and the mean with its interval."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ..intervals import interval
from .style import BLUE, GREY, INK, entitle, style_axes


def plot_gaps(abscissa: str, gaps: Mapping[str, Mapping[str, Sequence[float]]], message: str = "") -> Figure:
    """Return the figure of the gaps of each model's ways.

    Args:
        abscissa: what a gap is, with its unit.
        gaps: model → way → gap of each seed.
        message: the title; by default how far from exact training each number of bits ends.
    """
    figure = Figure(figsize=(10.6, 1.4 + 0.34 * max(map(len, gaps.values()), default=1)), layout="constrained")
    entitle(figure, message or _message(gaps))
    for axes, (model, ways) in zip(figure.subplots(1, len(gaps), squeeze=False)[0], gaps.items(), strict=True):
        style_axes(axes)
        axes.axvline(0, color=GREY, linewidth=1)
        for height, values in enumerate(ways.values()):
            found = interval(values)
            axes.plot(values, [height] * len(values), "o", color=GREY, markersize=3.5, alpha=0.7)
            half = found.half if math.isfinite(found.half) else 0
            axes.errorbar(found.mean, height, xerr=half, fmt="o", color=BLUE, markersize=5, linewidth=1.6)
        axes.set_yticks(range(len(ways)), list(ways))
        axes.invert_yaxis()
        axes.set_title(f"{model}, {max(map(len, ways.values()))} seeds", fontsize=9.5, color=INK, loc="left")
        axes.set_xlabel(abscissa, fontsize=8.5)
    return figure


def _message(gaps: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return how far from exact training each number of bits ends, in the mean of a model at most."""
    means = {
        bits: [interval(ways[bits]).mean for ways in gaps.values() if bits in ways] for bits in ("2 bits", "3 bits")
    }
    return "; ".join(f"{bits} end at most {max(own):+.3f} above exact" for bits, own in means.items() if own)
