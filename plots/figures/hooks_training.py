"""Validation losses minus those of exact training, a dot per seed, with the interval of their mean."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ..intervals import MARGIN, holm, interval, verdict
from .style import CYCLE, INK, SAND, entitle, style_axes


def plot_differences(differences: Mapping[str, Sequence[float]]) -> Figure:
    """Return a figure with a row for each variant: `differences` of each, one per seed."""
    figure = Figure(figsize=(8.4, 1.3 + 0.42 * len(differences)), layout="constrained", facecolor="white")
    entitle(figure, losses_message(differences))
    axes = figure.subplots()
    style_axes(axes)
    axes.axvspan(-MARGIN, MARGIN, color=SAND, zorder=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for row, (name, values) in enumerate(differences.items()):
        color, found = CYCLE[row % len(CYCLE)], interval(values)
        axes.plot(values, [row] * len(values), "o", color=color, markersize=5, alpha=0.8, label=name)
        if found.count > 1:
            axes.errorbar([found.mean], [row], xerr=[found.half], color=color, capsize=4, linewidth=1.6)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()
    axes.set_xlabel(f"validation loss less exact's of the same seed (dots), 95 % interval; band: ±{MARGIN}")
    return figure


def losses_message(gaps: Mapping[str, Sequence[float]]) -> str:
    """Return which variants' losses are above exact training's beyond chance, and which are equal to it.

    Args:
        gaps: of each variant, losses less exact training's of the same seed. Above: the 95 % interval leaves out zero
            after Holm's correction. Equal: it lies within `MARGIN`.
    """
    found = {name: interval(values) for name, values in gaps.items()}
    differs = dict(zip(found, holm(list(found.values())), strict=True))
    above = [name for name, gap in found.items() if differs[name] and gap.mean > 0 and verdict(gap) != "equal"]
    equal = [name for name, gap in found.items() if verdict(gap) == "equal"]
    parts = [f"above exact's beyond chance: {' · '.join(above)}"] if above else ["none above exact's beyond chance"]
    if equal:
        parts.append(f"equal within ±{MARGIN}: {' · '.join(equal)}")
    return "Validation loss: " + "; ".join(parts)
