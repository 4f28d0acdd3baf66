"""Throughput on a GPU: bandwidth of each pass of an activation relative to a copy's, by size."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, SKY, VERMILION, style_axes

# (contestant, pass) -> colour and line style.
_LOOKS: dict[tuple[str, str], tuple[str, str]] = {
    ("fewbit", "forward"): (VERMILION, "-"),
    ("fewbit", "backward"): (VERMILION, "--"),
    ("torch", "forward"): (BLUE, "-"),
    ("torch", "backward"): (BLUE, "--"),
    ("compiled", "forward"): (SKY, "-"),
    ("compiled", "backward"): (SKY, "--"),
}
_NAMES = {"fewbit": "fewbit", "torch": "torch", "compiled": "torch.compile"}


def plot_throughput(rows: Sequence[Mapping[str, Any]], device: str, bits: int = 3) -> Figure:
    """Return a figure with a panel per dtype: GB/s of the bytes that must move against elements; the copy's in grey.

    Args:
        rows: rows of the report of `fewbit bench activation --device cuda`.
        device: the GPU's name.
        bits: number of bits of fewbit's rows.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(3.4 * len(dtypes) + 0.6, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        here = [row for row in rows if row["dtype"] == dtype]
        copy = sorted((row["n"], row["gbs"]) for row in here if row["who"] == "copy")
        axes.plot(*zip(*copy, strict=True), color=GREY, linewidth=2.5, label="copy")
        for (who, which), (color, line) in _LOOKS.items():
            points = sorted(
                (row["n"], row["gbs"])
                for row in here
                if (row["who"], row["which"]) == (who, which) and (who != "fewbit" or row["bits"] == bits)
            )
            if points:
                label = f"{_NAMES[who]} {which}"
                axes.plot(
                    *zip(*points, strict=True), color=color, linestyle=line, marker="o", markersize=3, label=label
                )
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(dtype, fontsize=10, color=INK)
        axes.set_xlabel("elements", fontsize=9.5, color=INK)
        style_axes(axes)
    panels[0].set_ylabel("GB/s", fontsize=9.5, color=INK)
    figure.suptitle(f"GELU, {bits} bits, {device}", fontsize=10, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
