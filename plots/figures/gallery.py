"""The gallery: many activations in one figure, a small panel each (Figure 11 of the Few-bit Backward paper)."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...tables.names import counted
from .panel import Approximated, draw_panel, error_text, legend_entries, visible_span, weight_text
from .style import INK, shortened

_PANEL = (2.2, 1.75)  # inches


def plot_gallery(rows: Sequence[Approximated], columns: int = 4) -> Figure:
    """Return a figure with a panel for the first table of each of `rows`, in row-major order.

    Args:
        rows: at least one, all of one kind, weight and number of bits, which the figure's title states.
        columns: number of panels per row.
    """
    columns = min(columns, len(rows))
    lines = -(-len(rows) // columns)
    size = (_PANEL[0] * max(columns, 3), _PANEL[1] * lines + 0.9)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(wspace=0.03, hspace=0.03)  # type: ignore[union-attr]
    panels = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for row, axes in zip(rows, panels, strict=False):
        draw_panel(axes, row, row.tables[0], visible_span(row))
        table = row.tables[0]
        text = f"{shortened(row.name, 30)}\n{error_text(table)}, {counted(table.codes.size, 'interval')}"
        axes.set_title(text, fontsize=8.5, color=INK, linespacing=1.35)
        axes.tick_params(labelsize=7.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    for axes in panels[len(rows) :]:
        axes.remove()
    bits = max(row.tables[0].bits for row in rows)  # exact tables may need fewer
    title = f"{counted(bits, 'bit')}, kind {rows[0].tables[0].kind}, {weight_text(rows)}"
    figure.suptitle(title, fontsize=11, color=INK)
    handles, labels = legend_entries(figure.axes)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
