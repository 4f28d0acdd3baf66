"""Error against bits: what another bit buys, for every activation and both kinds of table."""

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..tables import KINDS, Table
from .style import CYCLE, INK, MARKERS, style_axes

LINE_STYLES: dict[str, Literal["--", "-"]] = {"interval": "--", "shared": "-"}


def plot_error(tables: Sequence[Table]) -> Figure:
    """Return a figure of error (log scale) against bits: a colour an activation, a line style a kind.

    Exact tables have no place on a log scale: a line of text names them.
    """
    figure = Figure(figsize=(6.6, 4.4), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    style_axes(axes)
    axes.set_xlabel("bits per element", fontsize=10.5, color=INK)
    axes.set_ylabel(r"error  $\int\,(f'(x) - q(x))^2\,w(x)\,dx$", fontsize=10.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(", ".join(dict.fromkeys(f"weight {t.weight}" for t in tables)), fontsize=9.5, color=INK)
    inexact = [table for table in tables if table.error > 0]
    if inexact:
        _draw_lines(axes, inexact)
        _add_legends(axes, inexact)
    else:
        axes.set_axis_off()
    note = exact_note(tables)
    if note and inexact:
        figure.supxlabel(note, fontsize=9, color=INK)
    elif note:
        axes.text(0.5, 0.5, note, ha="center", va="center", fontsize=11, color=INK, transform=axes.transAxes)
    return figure


def exact_note(tables: Sequence[Table]) -> str:
    """Return a line that names the activations with exact tables and the fewest bits of each, or nothing."""
    fewest: dict[str, int] = {}
    for table in tables:
        if table.error == 0:
            fewest[table.activation] = min(table.bits, fewest.get(table.activation, table.bits))
    parts = [f"{name} from {bits} bit{'s' if bits > 1 else ''}" for name, bits in fewest.items()]
    return f"exact (error 0): {', '.join(parts)}" if parts else ""


def _draw_lines(axes: Axes, tables: Sequence[Table]) -> None:
    for index, name in enumerate(_worst_first(tables)):
        for kind in KINDS:
            line = sorted((t.bits, t.error) for t in tables if (t.activation, t.kind) == (name, kind))
            axes.plot(
                [bits for bits, _ in line],
                [error for _, error in line],
                **_look(index),
                linestyle=LINE_STYLES[kind],
                # Where both kinds are equal (a monotone f') the shared line lies within the open marker.
                markerfacecolor="white" if kind == "interval" else None,
                label=f"{name} {kind}",
            )
    axes.set_yscale("log")


def _add_legends(axes: Axes, tables: Sequence[Table]) -> None:
    names = [Line2D([], [], **_look(i), label=name) for i, name in enumerate(_worst_first(tables))]
    kinds = [
        Line2D([], [], color=INK, linewidth=1.4, linestyle=LINE_STYLES[kind], label=kind)
        for kind in KINDS
        if any(table.kind == kind for table in tables)
    ]
    look = {"fontsize": 9.5, "labelcolor": INK, "handlelength": 2.6, "framealpha": 1.0, "edgecolor": "none"}
    # Errors fall with the bits, so the upper right corner is free for the kinds.
    axes.add_artist(axes.legend(handles=kinds, loc="upper right", **look))
    axes.legend(handles=names, loc="upper left", bbox_to_anchor=(1.0, 1.0), **look)


def _worst_first(tables: Sequence[Table]) -> list[str]:
    """Return the activations in the order in which their lines end, top to bottom."""
    last: dict[str, tuple[int, float]] = {}
    for table in tables:
        last[table.activation] = max(last.get(table.activation, (0, 0.0)), (table.bits, table.error))
    return sorted(last, key=lambda name: last[name][1], reverse=True)


def _look(index: int) -> dict[str, Any]:
    return {
        "color": CYCLE[index % len(CYCLE)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5.5,
        "linewidth": 1.4,
    }
