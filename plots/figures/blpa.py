"""Figures for the evaluation of BLPA: each takes the numbers that its command writes and returns a `Figure`."""

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .style import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    PURPLE,
    SAND,
    SAND_EDGE,
    VERMILION,
    entitle,
    label_ends,
    style_axes,
)

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
    ends, means = [], {}
    for place, name in enumerate(names):
        runs = [next(run for run in training["runs"] if run["variant"] == name) for training in trainings]
        curves = np.array([_smoothed(np.array(run["losses"])) for run in runs])
        steps, colour = np.arange(1, curves.shape[1] + 1), COLOURS.get(name, GREY)
        falling.plot(steps, curves.mean(0), color=colour, linewidth=1.4, label=name)
        ends.append((name, float(curves.mean(0)[-1]), colour))
        falling.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.13, linewidth=0)
        errors = [100 * run["test_error"] for run in runs]
        testing.plot(errors, [place] * len(errors), "o", color=colour, markersize=5)
        means[name] = float(np.mean(errors))
        testing.plot(means[name], place, "|", color=colour, markersize=18)
    testing.set_yticks(range(len(names)), names)
    testing.invert_yaxis()
    testing.set_xlim(left=0)
    label_ends(falling, ends)
    message = f"Test errors, %: {'; '.join(f'{name} {error:.1f}' for name, error in means.items())}"
    entitle(figure, textwrap.fill(message, 115))
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
        lines = {"SGD,\nbetween batches": ([layer["sgd"] for layer in layers], INK)}
        for index, bits in enumerate(layers[0]["errors"]):
            lines[f"{bits} bits"] = [layer["errors"][bits] for layer in layers], CYCLE[index]
        for name, (values, colour) in lines.items():
            axes.plot(x, values, color=colour, linewidth=1.2, label=name)
        if when == "end":
            label_ends(axes, [(name, values[-1], colour) for name, (values, colour) in lines.items()], 0.09)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    first = figure.axes[0]
    first.set_ylabel("mean squared difference of gradients", fontsize=10, color=INK)
    both = [*numbers["start"], *numbers["end"]]
    most = {bits: max(layer["errors"][bits] / layer["sgd"] for layer in both) for bits in both[0]["errors"]}
    parts = " and ".join(f"{100 * share:.0f} % ({bits} bits)" for bits, share in most.items())
    entitle(figure, f"Errors of gradients: in no layer above {parts} of the noise between batches")
    return figure


def plot_memory(numbers: dict[str, Any]) -> Figure:
    """Draw saved and peak bytes against depth, and the largest batches of Table 2."""
    figure = Figure(figsize=(11.4, 4.0), layout="constrained", facecolor="white")
    saved, peak, batches = figure.subplots(1, 3)
    for axes, what in ((saved, "saved"), (peak, "peak")):
        style_axes(axes)
        axes.set_title(f"{what}, MiB", fontsize=9.5, color=INK)
        axes.set_xlabel("layers of one size", fontsize=10, color=INK)
        ends = []
        for index, bits in enumerate(dict.fromkeys(row["bits"] for row in numbers["rows"])):
            rows = [row for row in numbers["rows"] if row["bits"] == bits]
            label = f"{bits} bits" if bits else "exact"
            colour = CYCLE[index - 1] if bits else INK
            values = [row[what] / 2**20 for row in rows]
            axes.plot([row["layers"] for row in rows], values, color=colour, marker=MARKERS[index], label=label)
            ends.append((label, values[-1], colour))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        label_ends(axes, ends)
    _draw_batches(batches, numbers["batches"])
    entitle(figure, _memory_message(numbers["rows"]))
    return figure


def _memory_message(rows: list[dict[str, Any]]) -> str:
    last = [row for row in rows if row["layers"] == max(each["layers"] for each in rows)]
    exact, few = last[0], min(last, key=lambda row: row["saved"])
    saved, peak = (exact[what] / few[what] for what in ("saved", "peak"))
    return f"{few['layers']} layers in {few['bits']} bits save {saved:.1f} times less, and peak {peak:.1f} times lower"


def _draw_batches(axes: Axes, rows: list[dict[str, Any]]) -> None:
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.set_title("largest batch, 4 bits: that of exact times (by layers)", fontsize=9.5, color=INK)
    places = np.arange(len(rows))
    ours, paper = ([row[few] / row[exact] for row in rows] for few, exact in (("few", "exact"), _PAPER))
    bars = ((-0.18, ours, BLUE, "white", "formula"), (0.18, paper, SAND, INK, "paper, 1080 Ti"))
    for shift, values, colour, ink, name in bars:
        axes.bar(places + shift, values, 0.34, color=colour, edgecolor=SAND_EDGE if colour == SAND else None)
        axes.text(float(places[0]) + shift, 0.2, name, rotation=90, ha="center", va="bottom", color=ink, size=8.5)
    axes.set_xticks(places, [f"{row['depth']}" + ("\n×4" if row["width"] == 64 else "") for row in rows])


_PAPER = ("paper_few", "paper_exact")


def _smoothed(losses: np.ndarray, part: int = 20) -> np.ndarray:
    window = max(1, len(losses) // part)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
