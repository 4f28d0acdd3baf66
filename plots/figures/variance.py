"""Variance of compressed gradients: split by layer, its causes, and against bits (ActNN, Figures 8, 3 and 5a)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, CYCLE, GREY, INK, MARKERS, VERMILION, entitle, label_ends, style_axes


@dataclass(frozen=True)
class Variances:
    """The numbers to draw; variances are summed over the elements of a gradient.

    Attributes:
        layers: names, in forward order.
        bits: bits at which the variance is split.
        terms: (L, L), of the weight of layer l and the context of layer m.
        empirical: of each weight, over repeated draws.
        sampling: of each weight, over minibatches.
        formula: of each context, the sum over the weights predicted by the sensitivities.
        shown: name of the layer of the two histograms.
        ranges: ranges of its groups.
        sensitivities: sensitivities of its samples.
        per_dimension: sensitivity by element, of each layer.
        curves: method → rows of bits and the variance of all parameters.
        squared_norm: squared norm of the gradient of all parameters, by which the curves are divided.
    """

    layers: Sequence[str]
    bits: int
    terms: Sequence[Sequence[float]]
    empirical: Sequence[float]
    sampling: Sequence[float]
    formula: Sequence[float]
    shown: str
    ranges: Sequence[float]
    sensitivities: Sequence[float]
    per_dimension: Sequence[float]
    curves: Mapping[str, Sequence[Sequence[float]]]
    squared_norm: float


def plot_variance(data: Variances) -> Figure:
    """Return a figure of six panels."""
    figure = Figure(figsize=(13, 8), layout="constrained", facecolor="white")
    share = sum(data.empirical) / sum(data.sampling)
    entitle(figure, f"{data.bits} bits add {share:.2f} of the variance that the choice of the minibatch causes")
    axes = figure.subplots(2, 3, width_ratios=(1.25, 1, 1))
    _draw_split(axes[0, 0], data)
    _draw_contexts(axes[0, 1], data)
    _draw_curves(axes[0, 2], data)
    _draw_histogram(axes[1, 1], data.ranges, f"range of each group at {data.shown}", "groups")
    _draw_histogram(axes[1, 2], data.sensitivities, f"sensitivity of each sample at {data.shown}", "samples")
    _draw_dimensions(axes[1, 0], data)
    return figure


def _draw_split(axes: Axes, data: Variances) -> None:
    """Draw Theorem 3: the terms as stacked bars, beside the variance measured with all contexts at once."""
    _style(axes, f"variance of each weight's gradient, {data.bits} bits", "", "variance")
    terms, L = np.asarray(data.terms), len(data.layers)
    at, own = np.arange(L), np.diag(terms)
    axes.bar(at, own, color=BLUE, label="by the layer's own context")
    axes.bar(at, terms.sum(1) - own, bottom=own, color=CYCLE[4], label="by the contexts after it")
    axes.plot(at, data.empirical, "x", color=INK, label="measured, all at once")
    axes.plot(at, data.sampling, "_", color=VERMILION, markersize=10, label="by the choice of the minibatch")
    _name_layers(axes, data.layers)
    axes.set_yscale("log")
    low, high = min(data.empirical), max(*data.sampling, *data.empirical)
    axes.set_ylim(low / 2, high * 30)  # room for the legend
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=2)


def _draw_contexts(axes: Axes, data: Variances) -> None:
    """Draw the variance predicted by the sensitivities against the measured one, a point per context."""
    _style(axes, "variance that each context causes", "by its sensitivities", "measured")
    measured, formula = np.asarray(data.terms).sum(0), np.asarray(data.formula)
    axes.plot(formula, measured, "o", color=BLUE, markersize=5)
    ends = [min(measured.min(), formula.min()) / 2, max(measured.max(), formula.max()) * 2]
    axes.plot(ends, ends, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")


def _draw_curves(axes: Axes, data: Variances) -> None:
    """Draw variance against bits, one line per method."""
    _style(axes, "all parameters", "bits for each element, on average", "variance / squared norm of the gradient")
    ends = []
    for (method, rows), colour, marker in zip(data.curves.items(), CYCLE, MARKERS, strict=False):
        bits, variance = np.asarray(rows).T
        shown = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        axes.plot(bits, variance / data.squared_norm, label=method, **shown)
        ends.append((method, float(variance[-1] / data.squared_norm), colour))
    sampling = sum(data.sampling) / data.squared_norm
    axes.axhline(sampling, color=GREY, linewidth=1, linestyle="--")
    axes.set_yscale("log")
    label_ends(axes, [*ends, ("choice of the\nminibatch", sampling, GREY)], 0.06)


def _draw_histogram(axes: Axes, values: Sequence[float], label: str, counted: str) -> None:
    _style(axes, label, "", counted)
    found = np.asarray(values)
    found = found[found > 0]
    if found.size:
        low, high = found.min(), found.max()
        axes.hist(found, bins=list(np.geomspace(low / 1.01, high * 1.01, 25)), color=BLUE)
        axes.set_xscale("log")


def _draw_dimensions(axes: Axes, data: Variances) -> None:
    _style(axes, "sensitivity by element", "", "sensitivity")
    axes.bar(np.arange(len(data.layers)), data.per_dimension, color=BLUE)
    axes.set_yscale("log")
    _name_layers(axes, data.layers)


def _name_layers(axes: Axes, layers: Sequence[str]) -> None:
    axes.set_xticks(np.arange(len(layers)), layers, rotation=90, fontsize=8)


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    style_axes(axes)
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
