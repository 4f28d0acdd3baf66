"""BLPA at 164 layers until it has learnt, and ten seeds on the small digits (BLPA, Figure 3 and Table 1).

    python -m fewbit.plots.studies depth

A narrow pre-activation ResNet-164 is trained exactly, with 8 and 4 bits for each saved activation, and naively, where
the forward pass computes with the 8-bit or 4-bit activations too. Runs of a seed begin with the same weights and see
the same batches. A run keeps its training loss at twenty moments, its test error and the bytes that it saves.

A difference to exact training counts if the 95 % interval of the paired differences leaves out zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..demo.data import COLLECTIONS
from ..demo.runs import averaging_window, smoothed
from ..figures.blpa import COLOURS
from ..figures.style import entitle, label_ends, style_axes
from ..intervals import differences, interval
from . import blpa
from .blpa import VARIANTS, Settings
from .experiment import Case, Experiment, Row

SETTINGS: Mapping[str, Settings] = {
    "mnist": Settings(width=4, batch=32, steps=1600),
    "digits": Settings(width=4, batch=32, steps=200),
}
SEEDS: Mapping[str, range] = {"mnist": range(2), "digits": range(10)}
RUNS: Mapping[str, Sequence[str]] = {
    "mnist": ("exact", "8 bits", "4 bits", "naive, 8 bits"),
    "digits": ("exact", "4 bits", "naive, 4 bits"),
}
SECONDS: Mapping[str, float] = {"mnist": 600, "digits": 60}
POINTS = 20  # of a curve

_images = cache(lambda name: COLLECTIONS[name]())


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


def cases() -> list[Case]:
    """Return a case for each seed and variant on the digits, then on the larger images."""
    return [
        {"images": images, "variant": variant, "seed": seed}
        for images in ("digits", "mnist")
        for seed in SEEDS[images]
        for variant in RUNS[images]
    ]


def measure(case: Case, steps: int | None = None, depth: int = 164) -> dict[str, Any]:
    """Train one network; return its curve, test loss, test error and saved bytes."""
    settings = replace(SETTINGS[case["images"]], seed=case["seed"], depth=depth)
    settings = replace(settings, steps=steps or settings.steps)
    variant = next(one for one in VARIANTS if one.name == case["variant"])
    run = blpa.train([variant], _images(case["images"]), settings).runs[0]
    losses = smoothed(run.losses, averaging_window(settings.steps))
    every = max(1, settings.steps // POINTS)
    return {
        "losses": [float(f"{loss:.5g}") for loss in losses[every - 1 :: every][:POINTS]],
        "loss": float(f"{run.test_loss:.5g}"),
        "error": round(run.test_error, 6),
        "saved": run.saved_bytes,
    }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each variant: its losses and test error, and differences to exact training paired by seed."""
    for images, variants in RUNS.items():
        own = [row for row in rows if row["images"] == images]
        for variant in variants:
            runs = [row for row in own if row["variant"] == variant]
            if not runs:
                continue
            final, error = fmean(row["losses"][-1] for row in runs), fmean(row["error"] for row in runs)
            text = f"{images:6} {variant:13} {len(runs)} seeds: training loss {final:.4f}, test error {error:.4f}"
            exact = differences(own, lambda row: row["variant"] == VARIANTS[0].name, ("images", "seed"), "error")
            gaps = [gap for row, gap in exact if row["variant"] == variant]  # of the same seed
            if gaps:
                found = interval(gaps)
                text += f", less exact's {found}{', counts' if found.counts else ''}"
            yield text


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: training losses and test errors on both sets of images."""
    panels = []
    for images, variants in RUNS.items():
        own = {v: [row for row in rows if (row["images"], row["variant"]) == (images, v)] for v in variants}
        curves = {v: [row["losses"] for row in found] for v, found in own.items() if found}
        errors = {v: [row["error"] for row in found] for v, found in own.items() if found}
        if curves:
            panels.append(Panel(images, SETTINGS[images].steps, curves, errors))
    return plot_depth(panels)


EXPERIMENT = Experiment("depth", cases, measure, lambda case: SECONDS[case["images"]], lines, draw)


# ---- the figure ------------------------------------------------------------------------------------------------------


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
