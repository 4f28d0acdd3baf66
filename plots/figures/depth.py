"""Training losses of exact, few-bit and naive networks on the left, the test error of each seed on the right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .blpa import COLOURS
from .style import entitle, label_ends, style_axes


@dataclass(frozen=True)
class Panel:
    """The runs on one set of images.

    Attributes:
        images: their name.
        steps: of a run.
        losses: by variant: a curve for each seed.
        errors: by variant: a test error for each seed, from 0 to 1.
    """

    images: str
    steps: int
    losses: Mapping[str, Sequence[Sequence[float]]]
    errors: Mapping[str, Sequence[float]]


def plot_depth(panels: Sequence[Panel]) -> Figure:
    """Return a figure with a row for each panel."""
    figure = Figure(figsize=(9.4, 0.9 + 2.7 * len(panels)), layout="constrained", facecolor="white")
    parts = [
        f"{panel.images} " + ", ".join(f"{100 * fmean(errors):.1f} % {name}" for name, errors in panel.errors.items())
        for panel in panels
    ]
    entitle(figure, "164 layers, test errors: " + ";\n".join(parts))
    grid = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(1.7, 1))
    for panel, (left, right) in zip(panels, grid, strict=True):
        _draw_losses(left, panel)
        style_axes(right)
        for row, (name, errors) in enumerate(panel.errors.items()):
            points = [100 * error for error in errors]
            right.plot(points, [row] * len(points), "o", color=COLOURS[name], alpha=0.5, markersize=4)
            right.plot(fmean(points), row, "|", color=COLOURS[name], markersize=18, markeredgewidth=2)
        right.set_yticks(range(len(panel.errors)), [*panel.errors])
        right.set_ylim(len(panel.errors) - 0.5, -0.5)
        right.set_xlim(left=0)
    grid[-1][0].set_xlabel("step")
    grid[-1][1].set_xlabel("test error by seed, %; stroke: mean")
    return figure


def _draw_losses(axes: Axes, panel: Panel) -> None:
    style_axes(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 4, 6)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("nats an image")
    axes.set_title(f"{panel.images}: training loss, mean and range over seeds", fontsize=9.5, loc="left")
    ends = []
    for name, curves in panel.losses.items():
        values = [*zip(*curves, strict=True)]
        steps = [panel.steps * (i + 1) / len(values) for i in range(len(values))]
        axes.fill_between(steps, [*map(min, values)], [*map(max, values)], color=COLOURS[name], alpha=0.13, lw=0)
        axes.plot(steps, [*map(fmean, values)], color=COLOURS[name], linewidth=1.5)
        ends.append((name, fmean(values[-1]), COLOURS[name]))
    label_ends(axes, ends, 0.07)
