"""Errors of tables that follow a training, beside tables calibrated once, relative to the default's."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, VERMILION, style_axes

if TYPE_CHECKING:
    from ..studies.adaptation import Followed


def plot_adaptation(runs: "Sequence[Followed]") -> Figure:
    """Return a figure with a row for each model and a column for each number of bits, of the runs of the first seed."""
    first = [run for run in runs if run.seed == min(other.seed for other in runs)]
    models, bits = list(dict.fromkeys(run.model for run in first)), sorted({run.bits for run in first})
    figure = Figure(figsize=(3.6 * len(bits), 0.5 + 2.7 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), len(bits), sharex=True, sharey=True, squeeze=False)
    for run in first:
        _draw(panels[models.index(run.model), bits.index(run.bits)], run)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("error of the table ÷ error of the default", fontsize=10)
    figure.suptitle(f"Tables solved anew every {first[0].adapt} steps fit the inputs that training makes", fontsize=11)
    return figure


def _draw(axes: Axes, run: "Followed") -> None:
    style_axes(axes)
    axes.set_title(f"{run.model}, {run.bits} bit{'s' if run.bits > 1 else ''}", fontsize=10, color=INK)
    steps = sorted({e.step for e in run.errors})
    axes.axhline(1, color=GREY, linewidth=1)
    lines = ("once", VERMILION, "calibrated once", 5), ("following", BLUE, "following", -13)
    for which, colour, label, above in lines:
        values = {step: [getattr(e, which) / e.default for e in run.errors if e.step == step] for step in steps}
        low, high = ([limit(values[step]) for step in steps] for limit in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        means = [fmean(values[step]) for step in steps]
        axes.plot(steps, means, color=colour, linewidth=1.6)
        axes.annotate(label, (steps[-1], means[-1]), (0, above), textcoords="offset points", ha="right", color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
