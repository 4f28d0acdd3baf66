"""`interval` beside `shared`: the gain from letting intervals share a level."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ...tables import Table
from ...tables.names import counted
from .panel import Approximated, draw_panel, error_text, legend_entries, name_text, visible_span, weight_text
from .style import INK, VERMILION, entitle

_PANEL = (3.6, 2.3)  # inches


def plot_kinds(rows: Sequence[Approximated]) -> Figure:
    """Return a figure with a row of two panels for each of `rows`, whose tables are one `interval` and one `shared`.

    Dotted lines mark the levels of a panel's table, to show which of its intervals share them.
    """
    size = (2 * _PANEL[0] + 0.6, _PANEL[1] * len(rows) + 0.8)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), 2, squeeze=False, sharex="row", sharey="row")
    for row, panels in zip(rows, grid, strict=True):
        interval, shared = row.tables
        span = visible_span(row)
        for axes, table, title in zip(panels, row.tables, kind_titles(interval, shared), strict=True):
            draw_panel(axes, row, table, span)
            axes.hlines(table.levels, *span, color=VERMILION, linewidth=0.8, linestyle=":", alpha=0.7, label="levels")
            axes.set_title(title, fontsize=9.5, color=INK, linespacing=1.4)
            axes.set_xlabel("$x$", fontsize=10, color=INK, labelpad=1)
        panels[0].set_ylabel(name_text(row), fontsize=10.5, color=INK)
    entitle(figure, f"{_message(rows)} ({weight_text(rows)})")
    handles, labels = legend_entries(figure.axes)
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9.5)
    return figure


def _message(rows: Sequence[Approximated]) -> str:
    pairs = [row.tables for row in rows]
    less = sorted(round(100 * (1 - shared.error / interval.error)) for interval, shared in pairs if interval.error)
    if not less or less[-1] < 1:
        return "Intervals that share levels err no less"
    amount = f"{less[0]} to {less[-1]}" if less[0] < less[-1] else f"{less[0]}"
    return f"Intervals that share levels err {amount} % less"


def kind_titles(interval: Table, shared: Table) -> tuple[str, str]:
    """Return the titles of both panels: kind and size; the error, for `shared` by what factor it is smaller."""
    less = 1 - shared.error / interval.error if interval.error else 0.0
    gain = f", {100 * less:.0f} % less" if less >= 0.005 else ", no less" if interval.error else ""
    return f"{_size(interval)}\n{error_text(interval)}", f"{_size(shared)}\n{error_text(shared)}{gain}"


def _size(table: Table) -> str:
    levels, intervals = counted(table.levels.size, "level"), counted(table.codes.size, "interval")
    return f"{table.kind}, {counted(table.bits, 'bit')}: {levels}, {intervals}"
