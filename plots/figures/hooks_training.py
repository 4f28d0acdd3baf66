"""Validation losses minus those of exact training, a dot per seed, over the spread between seeds."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from .style import CYCLE, INK, SAND, entitle, style_axes


def plot_differences(differences: Mapping[str, Sequence[float]], deviation: float) -> Figure:
    """Return a figure with a row for each variant.

    Args:
        differences: of each variant, one per seed.
        deviation: standard deviation of the exact runs, drawn as a band.
    """
    figure = Figure(figsize=(8.4, 1.3 + 0.42 * len(differences)), layout="constrained", facecolor="white")
    entitle(figure, _message(differences, deviation))
    axes = figure.subplots()
    style_axes(axes)
    axes.axvspan(-deviation, deviation, color=SAND, zorder=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for row, (name, values) in enumerate(differences.items()):
        color = CYCLE[row % len(CYCLE)]
        axes.plot(values, [row] * len(values), "o", color=color, markersize=5, alpha=0.8, label=name)
        axes.plot([sum(values) / len(values)], [row], "|", color=color, markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()
    axes.set_xlabel("validation loss less exact's of the same seed (dots), mean (bar), deviation of the seeds (band)")
    return figure


def _message(differences: Mapping[str, Sequence[float]], deviation: float) -> str:
    means = {name: sum(values) / len(values) for name, values in differences.items()}
    above = [name for name, mean in means.items() if mean > deviation]
    if above:
        return f"More than a deviation of the seeds above exact training: {' · '.join(above)}"
    return "None ends, on average, more than a deviation of the seeds above exact training"
