"""f' and its few-bit tables (Figures 1 and 11 of the Few-bit Backward paper).

One row an activation, one panel a table: f' as a line, q as steps, and between them, shaded, what is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..tables import Table
from .style import BLUE, INK, VERMILION, style_axes

Vector = NDArray[np.float64]
Span = tuple[float, float]

_PANEL = (2.75, 2.3)  # inches
_POINTS = 2001


@dataclass(frozen=True)
class Approximated:
    """One row of the figure.

    Attributes:
        name: what f is called, such as ``gelu``.
        derivative: f', float64 to float64, elementwise; at a kink its value from the left.
        domain: where the weight of the tables lies; of it that part is drawn in which something happens.
        tables: the tables of f', one panel each; at least one.
        kinks: where f' may jump, so that the line is broken there and not drawn across.
    """

    name: str
    derivative: Callable[[Vector], Vector]
    domain: Span
    tables: Sequence[Table]
    kinks: tuple[float, ...] = ()


def plot_approximation(rows: Sequence[Approximated]) -> Figure:
    """Return a figure: a row of panels for each of `rows`, each panel titled with its table's numbers."""
    columns = max(len(row.tables) for row in rows)
    size = (_PANEL[0] * max(columns, 1.6) + 0.6, _PANEL[1] * len(rows) + 0.8)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex="row", sharey="row")
    for row, panels in zip(rows, grid, strict=True):
        span = visible_span(row)
        for axes, table in zip(panels, row.tables, strict=False):
            _draw_panel(axes, row, table, span)
        for axes in panels[len(row.tables) :]:
            axes.remove()
        panels[0].set_ylabel(f"$f$ = {row.name}", fontsize=10.5, color=INK)
        for axes in panels[: len(row.tables)]:
            axes.set_xlabel("$x$", fontsize=10, color=INK, labelpad=1)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def panel_title(table: Table) -> str:
    """Return two lines: bits, levels and intervals; the error."""
    bits, K, intervals = table.bits, table.levels.size, table.codes.size
    # Where intervals do not share levels, the number of intervals is the number of levels.
    shape = f"{intervals} intervals" if intervals == K else f"{K} levels, {intervals} intervals"
    error = f"error {table.error:.3g}" if table.error else "exact"
    return f"{bits} bit{'s' if bits > 1 else ''}: {shape}\n{error}"


def visible_span(row: Approximated) -> Span:
    """Return the part of the line to draw: where f' is on its way and where boundaries are, with a margin."""
    x = np.linspace(*row.domain, _POINTS)
    derivative = row.derivative(x)
    arrived = 0.01 * np.ptp(derivative)
    left = x[np.abs(derivative - derivative[0]) > arrived][:1]  # the first point away from f' at the left end
    right = x[np.abs(derivative - derivative[-1]) > arrived][-1:]
    points = np.concatenate([left, right, *(table.boundaries for table in row.tables)])
    if points.size == 0:  # f' is constant
        return row.domain
    low, high = float(points.min()), float(points.max())
    margin = max(0.15 * (high - low), 0.02 * (row.domain[1] - row.domain[0]))
    return low - margin, high + margin


def steps(table: Table, span: Span) -> tuple[Vector, Vector]:
    """Return the edges (m + 1,) and values (m,) of the m steps that q makes over `span`."""
    low, high = span
    inner = (table.boundaries > low) & (table.boundaries < high)
    edges = np.concatenate([[low], table.boundaries[inner], [high]])
    return edges, table(edges[1:])  # intervals are closed on the right


def _draw_panel(axes: Axes, row: Approximated, table: Table, span: Span) -> None:
    style_axes(axes)
    x = _abscissae(span, np.concatenate([table.boundaries, row.kinks]))
    derivative = row.derivative(x)
    axes.fill_between(x, derivative, table(x), color=BLUE, alpha=0.18, linewidth=0, label="the difference")
    # A line that meets NaN stops, and starts again after it: f' has no value between the two sides of a jump.
    gaps = np.searchsorted(x, np.intersect1d(x, row.kinks), side="right")
    broken = np.insert(x, gaps, np.nan), np.insert(derivative, gaps, np.nan)
    axes.plot(*broken, color=INK, linewidth=1.2, label="$f'$, the derivative")
    edges, values = steps(table, span)
    axes.stairs(values, edges, baseline=None, color=VERMILION, linewidth=1.6, label="$q$, the table")
    axes.set_xlim(*span)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_title(panel_title(table), fontsize=9.5, color=INK, linespacing=1.4)


def _abscissae(span: Span, breaks: Vector) -> Vector:
    """Return points over `span` with both sides of every break, so that what jumps there is drawn upright."""
    low, high = span
    inside = breaks[(breaks > low) & (breaks < high)]
    return np.unique(np.concatenate([np.linspace(low, high, _POINTS), inside, np.nextafter(inside, np.inf)]))
