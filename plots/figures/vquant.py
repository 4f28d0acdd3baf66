"""Figures of V-Quant's studies: each takes the numbers that its command writes and returns a `Figure`."""

from typing import Any

from matplotlib.figure import Figure

from ...tables.names import counted
from .style import BLUE, CYCLE, GREY, INK, MARKERS, VERMILION, entitle, label_ends, style_axes

# The place of a name before a line's first point.
_BESIDE: Any = {"textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 9}


def plot_accuracy(numbers: dict[str, Any]) -> Figure:
    """Draw accuracy against the ratio of large values, a line for each number of bits: V-Quant left, RV-Quant right."""
    figure, axes = _figure(2, sharey=True)
    rows = numbers["rows"]
    exact = next(row for row in rows if row["method"] == "exact")
    named = []
    for ax, method in zip(axes, ("V-Quant", "RV-Quant"), strict=True):
        ends = [("exact", 100 * exact["accuracy"], INK)]
        for bits in sorted({row["bits"] for row in rows if row["method"] == method}):
            line = [row for row in rows if row["method"] == method and row["bits"] == bits]
            x, y = [100 * row["ratio"] for row in line], [100 * row["accuracy"] for row in line]
            color, marker = CYCLE[bits - 1], MARKERS[bits - 1]
            ax.plot(x, y, color=color, marker=marker, linewidth=1.6)
            ends.append((counted(bits, "bit"), y[-1], color))
            for row, at in zip(line, x, strict=True):
                spread = [100 * a for a in row["accuracies"]]
                ax.plot([at, at], [min(spread), max(spread)], color=color, linewidth=0.8, alpha=0.6)
        ax.axhline(100 * exact["accuracy"], color=INK, linewidth=1, linestyle="--")
        ax.set_title(method, fontsize=10.5, color=INK)
        ax.set_xlabel("large values, %", fontsize=10, color=INK)
        named.append((ax, ends))
    axes[0].set_ylabel("validation accuracy, %", fontsize=10, color=INK)
    for ax, ends in named:  # once both have drawn: they share their limits
        label_ends(ax, ends)
    entitle(figure, _accuracy_message(rows, exact))
    return figure


def _accuracy_message(rows: list[dict[str, Any]], exact: dict[str, Any]) -> str:
    """Say how much the worst setting without large values gains by the fewest of them."""
    alone = min((row for row in rows if not row["ratio"]), key=lambda row: row["accuracy"])
    if alone is exact:
        return f"No setting without large values is below exact training's {100 * exact['accuracy']:.1f} %"
    text = f"{alone['method']}, {counted(alone['bits'], 'bit')}: {100 * alone['accuracy']:.1f} % alone"
    key = alone["method"], alone["bits"]
    helped = sorted(
        (row["ratio"], row["accuracy"]) for row in rows if (row["method"], row["bits"]) == key and row["ratio"]
    )
    if helped:
        ratio, accuracy = helped[0]
        text += f", {100 * accuracy:.1f} % with {100 * ratio:g} % of large values"
    return f"{text}; exact {100 * exact['accuracy']:.1f} %"


def plot_annealing(numbers: dict[str, Any]) -> Figure:
    """Draw training losses by epoch, a panel for each pair of mirrored schedules."""
    rows = numbers["rows"]
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    figure, axes = _figure(len(pairs), sharey=True)
    for ax, pair in zip(axes, pairs, strict=True):
        for place, (row, color, marker) in enumerate(zip(pair, (BLUE, VERMILION), MARKERS, strict=False)):
            text = "-".join("(F)" if bits is None else f"({bits},{ratio:g})" for bits, ratio in row["phases"])
            means = [sum(at) / len(at) for at in zip(*row["losses"], strict=True)]
            label = f"{text}: {100 * row['accuracy']:.1f} %"
            epochs = range(1, len(means) + 1)
            ax.plot(epochs, means, color=color, marker=marker, markersize=4, linewidth=1.6)
            ax.text(0.97, 0.96 - 0.07 * place, label, transform=ax.transAxes, ha="right", va="top", size=9, color=color)
        ax.set_yscale("log")
        ax.set_xlabel("epoch", fontsize=10, color=INK)
        ax.set_title("(bits, % of large values) by third: accuracy", fontsize=9.5, color=INK, loc="left")
    axes[0].set_ylabel("training loss, nats", fontsize=10, color=INK)
    gaps = [100 * (late["accuracy"] - early["accuracy"]) for late, early in pairs]
    listed = ", ".join(f"{gap:+.1f}" for gap in gaps)
    entitle(figure, f"Few bits late rather than early: {listed} points of accuracy")
    return figure


def plot_inference(numbers: dict[str, Any]) -> Figure:
    """Draw accuracy against bits, before and after fine-tuning, and the last layer's input of four classes by PCA."""
    points = numbers["pca"]
    figure = Figure(figsize=(3.0 * len(points), 6.4), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2 * len(points))
    ratios = sorted({row["weight_ratio"] for row in next(iter(numbers["rows"].values()))})
    for i, (name, rows) in enumerate(numbers["rows"].items()):
        ax = figure.add_subplot(grid[0, i * len(points) : (i + 1) * len(points)])
        style_axes(ax)
        for ratio, color, marker in zip(ratios, CYCLE, MARKERS, strict=False):
            line = [row for row in rows if row["weight_ratio"] == row["activation_ratio"] == ratio]
            x, y = [row["bits"] for row in line], [100 * row["accuracy"] for row in line]
            ax.plot(x, y, color=color, marker=marker, linewidth=1.6)
            ax.annotate(f"{100 * ratio:g} %", (x[0], y[0]), (-7, 0), **_BESIDE, color=color)
        ax.axhline(100 * numbers["accuracy"], color=INK, linewidth=1, linestyle="--")
        ax.margins(x=0.12)
        ax.set_xticks(sorted({row["bits"] for row in rows}))
        ax.set_xlabel("bits of weights and activations", fontsize=10, color=INK)
        ax.set_ylabel("validation accuracy, %", fontsize=10, color=INK)
        ax.set_title(f"{name}, by share of large values; dashed: full precision", fontsize=9.5, color=INK)
    entitle(figure, _inference_message(numbers["rows"]))
    for i, row in enumerate(points):
        ax = figure.add_subplot(grid[1, 2 * i : 2 * i + 2])
        style_axes(ax)
        for c in sorted(set(row["classes"])):
            chosen = [p for p, k in zip(row["points"], row["classes"], strict=True) if k == c]
            ax.plot(*zip(*chosen, strict=True), ".", color=CYCLE[c], markersize=4, label=str(c))
        ax.set_title(f"{row['name']}: separation {row['separation']:.1f}", fontsize=9.5, color=INK)
        ax.tick_params(labelbottom=False, labelleft=False)
    return figure


def _inference_message(tables: dict[str, list[dict[str, Any]]]) -> str:
    """Say how far large values raise the accuracy at the fewest bits."""
    parts, bits, most = [], 0, 0.0
    for name, rows in tables.items():
        bits, most = min(row["bits"] for row in rows), max(row["weight_ratio"] for row in rows)
        few = {r["weight_ratio"]: r for r in rows if r["bits"] == bits and r["weight_ratio"] == r["activation_ratio"]}
        parts.append(f"from {100 * few[min(few)]['accuracy']:.0f} to {100 * few[most]['accuracy']:.0f} % {name}")
    return f"{100 * most:g} % of large values raise the accuracy at {counted(bits, 'bit')} {', '.join(parts)}"


def plot_lstm(numbers: dict[str, Any]) -> Figure:
    """Draw perplexity against bits, a panel for each model."""
    rows = numbers["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = _figure(len(models))
    for ax, model in zip(axes, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        for ratio, color, marker in zip((0.01, 0.03), CYCLE, MARKERS, strict=False):
            line = [row for row in own if row["bits"] and row["ratio"] == ratio]
            x, y = [row["bits"] for row in line], [row["perplexity"] for row in line]
            ax.plot(x, y, color=color, marker=marker, linewidth=1.6)
            ax.annotate(f"{100 * ratio:g} %", (x[0], y[0]), (-7, 0), **_BESIDE, color=color)
        ax.axhline(own[0]["perplexity"], color=INK, linewidth=1, linestyle="--")
        ax.margins(x=0.12)
        ax.set_xticks([2, 3, 4])
        ax.set_title(f"{own[0]['hidden']} hidden units, % of large values; dashed: float32", fontsize=9.5, color=INK)
        ax.set_xlabel("bits of a weight", fontsize=10, color=INK)
    axes[0].set_ylabel("validation perplexity", fontsize=10, color=INK)
    exact = {row["model"]: row["perplexity"] for row in rows if not row["bits"]}
    most: dict[int, float] = {}
    for row in rows:
        if row["bits"]:
            more = row["perplexity"] / exact[row["model"]] - 1
            most[row["bits"]] = max(most.get(row["bits"], more), more)
    parts = ", ".join(f"{100 * more:.1f} % in {bits} bits" for bits, more in sorted(most.items()))
    entitle(figure, f"Perplexity above float32's, at most: {parts}")
    return figure


def plot_memory(numbers: dict[str, Any]) -> Figure:
    """Draw GB of activations by network: full precision, the paper's (3,2) and ours."""
    figure, (ax,) = _figure(1, width=8.5)
    rows = numbers["rows"]
    ends = []
    bars = (("full", GREY, "paper", 0), ("paper, (3,2)", VERMILION, "paper", 3), ("ours, (3,2)", BLUE, "ours", 3))
    for shift, (label, color, key, column) in enumerate(bars):
        x = [i + 0.27 * (shift - 1) for i in range(len(rows))]
        ax.bar(x, [row[key][column] for row in rows], 0.25, color=color)
        ends.append((label, rows[-1][key][column], color))
    ax.set_yscale("log")
    ax.set_xticks(range(len(rows)), [row["network"] for row in rows], rotation=20, ha="right")
    ax.set_ylabel("activations of 256 images, GB", fontsize=10, color=INK)
    label_ends(ax, ends)
    shares = sorted(row["ours"][3] / row["paper"][3] for row in rows)
    entitle(
        figure,
        f"Activations in 3 bits with 2 % of large values: {shares[0]:.2f} to {shares[-1]:.2f} of the paper's bytes",
    )
    return figure


def _figure(panels: int, width: float | None = None, *, sharey: bool = False) -> tuple[Figure, list[Any]]:
    size = (width or 4.2 * panels, 3.8)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])
    for ax in axes:
        style_axes(ax)
    return figure, axes
