"""Figures for the evaluation of BLPA: each takes the numbers that its command writes and returns a `Figure`."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .style import BLUE, CYCLE, GREEN, GREY, INK, MARKERS, ORANGE, PURPLE, SAND, SAND_EDGE, VERMILION, style_axes

COLOURS = {
    "exact": INK,
    "8 bits": BLUE,
    "4 bits": GREEN,
    "naive, 8 bits": ORANGE,
    "naive, 4 bits": VERMILION,
    "exact, 1/4 of the features": PURPLE,
}


def plot_training(numbers: dict[str, Any]) -> Figure:
    """Draw training losses by step, a band over the seeds for each variant (Figure 3), and the test errors."""
    trainings = numbers["trainings"]
    figure = Figure(figsize=(11.4, 4.2), layout="constrained", facecolor="white")
    falling, testing = figure.subplots(1, 2, width_ratios=(1.7, 1))
    style_axes(falling)
    falling.set_title(f"training loss on {trainings[0]['images']}; bands: lowest to highest seed", fontsize=9.5)
    falling.set_xlabel("step", fontsize=10, color=INK)
    falling.set_ylabel("nats an image", fontsize=10, color=INK)
    falling.set_yscale("log")
    style_axes(testing)
    testing.set_title("test error of each seed, %; computed exactly", fontsize=9.5)
    names = [run["variant"] for run in trainings[0]["runs"]]
    for place, name in enumerate(names):
        runs = [next(run for run in training["runs"] if run["variant"] == name) for training in trainings]
        curves = np.array([_smoothed(np.array(run["losses"])) for run in runs])
        steps, colour = np.arange(1, curves.shape[1] + 1), COLOURS.get(name, GREY)
        falling.plot(steps, curves.mean(0), color=colour, linewidth=1.4, label=name)
        falling.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.13, linewidth=0)
        errors = [100 * run["test_error"] for run in runs]
        testing.plot(errors, [place] * len(errors), "o", color=colour, markersize=5)
        testing.plot(np.mean(errors), place, "|", color=colour, markersize=18)
    testing.set_yticks(range(len(names)), names)
    testing.invert_yaxis()
    testing.set_xlim(left=0)
    figure.legend(*falling.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_gradient_noise(numbers: dict[str, Any]) -> Figure:
    """Draw the squared error of each layer's gradient beside the noise of SGD, at the start and the end (Figure 4)."""
    figure = Figure(figsize=(11.4, 4.2), layout="constrained", facecolor="white")
    for axes, when in zip(figure.subplots(1, 2, sharey=True), ("start", "end"), strict=True):
        style_axes(axes)
        axes.set_title(f"{when} of training, {numbers['images']}", fontsize=9.5, color=INK)
        axes.set_xlabel("layer", fontsize=10, color=INK)
        axes.set_yscale("log")
        layers = numbers[when]
        x = [layer["layer"] for layer in layers]
        axes.plot(x, [layer["sgd"] for layer in layers], color=INK, linewidth=1.2, label="SGD, between batches")
        for index, bits in enumerate(layers[0]["errors"]):
            errors = [layer["errors"][bits] for layer in layers]
            axes.plot(x, errors, color=CYCLE[index], linewidth=1.2, label=f"approximation, {bits} bits")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    first = figure.axes[0]
    first.set_ylabel("mean squared difference of gradients", fontsize=10, color=INK)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_memory(numbers: dict[str, Any]) -> Figure:
    """Draw saved and peak bytes against depth, and the largest batches of Table 2."""
    figure = Figure(figsize=(11.4, 4.0), layout="constrained", facecolor="white")
    saved, peak, batches = figure.subplots(1, 3)
    for axes, what in ((saved, "saved"), (peak, "peak")):
        style_axes(axes)
        axes.set_title(f"{what}, MiB", fontsize=9.5, color=INK)
        axes.set_xlabel("layers of one size", fontsize=10, color=INK)
        for index, bits in enumerate(dict.fromkeys(row["bits"] for row in numbers["rows"])):
            rows = [row for row in numbers["rows"] if row["bits"] == bits]
            label = f"{bits} bits" if bits else "exact"
            colour = CYCLE[index - 1] if bits else INK
            values = [row[what] / 2**20 for row in rows]
            axes.plot([row["layers"] for row in rows], values, color=colour, marker=MARKERS[index], label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    saved.legend(frameon=False, fontsize=9)
    _draw_batches(batches, numbers["batches"])
    return figure


def _draw_batches(axes: Axes, rows: list[dict[str, Any]]) -> None:
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.set_title("largest batch, 4 bits: that of exact times", fontsize=9.5, color=INK)
    places = np.arange(len(rows))
    ours, paper = ([row[few] / row[exact] for row in rows] for few, exact in (("few", "exact"), _PAPER))
    axes.bar(places - 0.18, ours, 0.34, color=BLUE, label="formula")
    axes.bar(places + 0.18, paper, 0.34, color=SAND, edgecolor=SAND_EDGE, label="paper, 1080 Ti")
    axes.set_xticks(places, [f"{row['depth']}" + ("\n×4" if row["width"] == 64 else "") for row in rows])
    axes.legend(frameon=False, fontsize=9)


_PAPER = ("paper_few", "paper_exact")


def _smoothed(losses: np.ndarray, part: int = 20) -> np.ndarray:
    window = max(1, len(losses) // part)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
