"""f' and its few-bit tables (Figure 1 of the Few-bit Backward paper): one row per activation, one panel per table."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ...tables import Table
from ...tables.names import counted
from .panel import Approximated, draw_panel, error_text, legend_entries, name_text, visible_span, weight_text
from .style import INK

_PANEL = (2.75, 2.3)  # inches


def plot_approximation(rows: Sequence[Approximated]) -> Figure:
    """Return a figure with a row of panels for each of `rows`; a panel's title lists its table's numbers."""
    columns = max(len(row.tables) for row in rows)
    size = (_PANEL[0] * max(columns, 1.6) + 0.6, _PANEL[1] * len(rows) + 0.8)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex="row", sharey="row")
    for row, panels in zip(rows, grid, strict=True):
        span = visible_span(row)
        for axes, table in zip(panels, row.tables, strict=False):
            draw_panel(axes, row, table, span)
            axes.set_title(panel_title(table), fontsize=9.5, color=INK, linespacing=1.4)
        for axes in panels[len(row.tables) :]:
            axes.remove()
        panels[0].set_ylabel(name_text(row), fontsize=10.5, color=INK)
        for axes in panels[: len(row.tables)]:
            axes.set_xlabel("$x$", fontsize=10, color=INK, labelpad=1)
    figure.suptitle(weight_text(rows), fontsize=10, color=INK)
    handles, labels = legend_entries(figure.axes)
    ncols = 2 if columns < 3 and len(labels) > 3 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9.5)
    return figure


def panel_title(table: Table) -> str:
    """Return two lines: bits, levels and intervals; the error."""
    intervals = counted(table.codes.size, "interval")
    # Without shared levels, the number of intervals is the number of levels.
    shared = table.codes.size != table.levels.size
    shape = f"{counted(table.levels.size, 'level')}, {intervals}" if shared else intervals
    return f"{counted(table.bits, 'bit')}: {shape}\n{error_text(table)}"
