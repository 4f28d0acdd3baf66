"""One panel: f' as a line, a table q as steps, the error between them shaded, and the weight behind."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ...tables import Table
from .style import BLUE, INK, SAND, SAND_EDGE, VERMILION, shortened, style_axes

Vector = NDArray[np.float64]
Span = tuple[float, float]

_POINTS = 2001
_LETTERS = 20  # letters of a name that fit along a panel's side
_LEAST = 0.35  # minimum share of the weight's domain to show, even if f' varies in a small part of it only
# Tail shares of the weight at either end: f' may be cut off beyond the first, boundaries beyond the second.
_TAIL, _FAR_TAIL = 5e-4, 1e-9
_HEIGHT = 0.88  # of the panel, for the weight


@dataclass(frozen=True)
class Approximated:
    """A derivative with its tables.

    Attributes:
        name: name of f, such as ``gelu``.
        derivative: f', float64 to float64, elementwise; at a kink its value from the left.
        domain: domain of the tables' weight; only the part where f' varies is drawn.
        tables: the tables of f'; at least one.
        kinks: points where f' may jump, at which the line is broken.
        weight: w, float64 to float64, elementwise within the domain, drawn as an area behind f'; None draws none.
    """

    name: str
    derivative: Callable[[Vector], Vector]
    domain: Span
    tables: Sequence[Table]
    kinks: tuple[float, ...] = ()
    weight: Callable[[Vector], Vector] | None = None


def draw_panel(axes: Axes, row: Approximated, table: Table, span: Span) -> None:
    """Draw f', one of its tables and the weight over `span`."""
    style_axes(axes)
    breaks = np.concatenate([table.boundaries, row.kinks, row.domain])
    low, high = span
    inside = breaks[(breaks > low) & (breaks < high)]
    # Both sides of every break are points, so that jumps are drawn vertically.
    x = np.unique(np.concatenate([np.linspace(low, high, _POINTS), inside, np.nextafter(inside, np.inf)]))
    derivative = row.derivative(x)
    counts = (row.domain[0] <= x) & (x <= row.domain[1])
    lost = {"color": BLUE, "alpha": 0.22, "linewidth": 0}
    below, above = table.around(x)
    if table.kind == "stochastic":
        axes.fill_between(x, below, above, where=counts, label="between two levels", **lost)
    else:
        axes.fill_between(x, derivative, below, where=counts, label="the difference", **lost)
    # NaN interrupts a line: f' has no value between the two sides of a jump.
    gaps = np.searchsorted(x, np.intersect1d(x, row.kinks), side="right")
    broken = np.insert(x, gaps, np.nan), np.insert(derivative, gaps, np.nan)
    axes.plot(*broken, color=INK, linewidth=1.2, label="$f'$, the derivative")
    for edges, values in steps(table, span):
        axes.stairs(values, edges, baseline=None, color=VERMILION, linewidth=1.6, label="$q$, the table")
    _draw_weight(axes, row, span)
    axes.set_xlim(*span)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def visible_span(row: Approximated) -> Span:
    """Return the part of the domain to draw: where f' varies under the weight and boundaries lie, with a margin."""
    low, high = row.domain
    x = np.linspace(low, high, _POINTS)
    derivative = row.derivative(x)
    arrived = 0.01 * np.ptp(derivative)
    left = x[np.abs(derivative - derivative[0]) > arrived][:1]  # the first point away from f' at the left end
    right = x[np.abs(derivative - derivative[-1]) > arrived][-1:]
    near, far = _weighty(row)
    boundaries = [np.clip(table.boundaries, *far) for table in row.tables]
    points = np.concatenate([np.clip(left, *near), np.clip(right, *near), *boundaries])
    if points.size == 0:  # f' is constant
        return row.domain
    first, last = float(points.min()), float(points.max())
    margin = max(0.15 * (last - first), 0.5 * (_LEAST * (near[1] - near[0]) - (last - first)))
    return max(low, first - margin), min(high, last + margin)


def steps(table: Table, span: Span) -> list[tuple[Vector, Vector]]:
    """Return the edges (m + 1,) and values (m,) of the m steps that q makes over `span`; two of kind ``stochastic``."""
    low, high = span
    inner = (table.boundaries > low) & (table.boundaries < high)
    edges = np.concatenate([[low], table.boundaries[inner], [high]])
    values = table.around(edges[1:])  # intervals are closed on the right
    return [(edges, value) for value in values[: 2 if table.kind == "stochastic" else 1]]


def legend_entries(panels: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """Return the handles and labels of all `panels`, without duplicate labels."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    return list(entries.values()), list(entries)


def name_text(row: Approximated) -> str:
    """Return ``f' of gelu``; a long expression takes two lines and is cut to the panel's height."""
    name = shortened(row.name, 2 * _LETTERS)
    return f"$f'$ of {name[:_LETTERS]}" + (f"\n{name[_LETTERS:]}" if len(name) > _LETTERS else "")


def error_text(table: Table) -> str:
    """Return ``error 0.00809``, or ``exact``."""
    return f"error {table.error:#.3g}".rstrip(".") if table.error else "exact"


def weight_text(rows: Iterable[Approximated]) -> str:
    """Return a title with the weights of the tables of `rows`."""
    weights = dict.fromkeys(table.weight for row in rows for table in row.tables)
    return ", ".join(f"weight {shortened(weight, 60)}" for weight in weights)


def _draw_weight(axes: Axes, row: Approximated, span: Span) -> None:
    """Fill the area under w, scaled to the panel's height; a constant w is not drawn."""
    x = np.linspace(*span, _POINTS)
    w = _density(row, x)
    if w.max() - w.min() <= 1e-9 * w.max():
        return
    # Measured weights may have narrow peaks (the zeros behind a ReLU): clip them, so that the rest is visible.
    scale = float(np.quantile(w, 0.995)) or float(w.max())
    heights = np.minimum(_HEIGHT * w / scale, 1.0)
    axes.fill_between(
        *(x, 0.0, heights),
        transform=axes.get_xaxis_transform(),  # heights are relative to the panel
        facecolor=SAND,
        edgecolor=SAND_EDGE,
        linewidth=0.8,
        zorder=0,
        label="$w$, the weight",
    )


def _density(row: Approximated, x: Vector) -> Vector:
    """Return w at `x`, and 0 outside its domain, where it need not be defined."""
    if row.weight is None:
        return np.zeros_like(x)
    within = (row.domain[0] <= x) & (x <= row.domain[1])
    return np.where(within, row.weight(np.clip(x, *row.domain)), 0.0)


def _weighty(row: Approximated) -> tuple[Span, Span]:
    """Return the parts of the domain that hold all of the weight but `_TAIL` and `_FAR_TAIL` of it at either end."""
    if row.weight is None:
        return row.domain, row.domain
    x = np.linspace(*row.domain, 20 * _POINTS)
    mass = np.cumsum(_density(row, x))
    if not math.isfinite(mass[-1]) or mass[-1] <= 0:  # peaks that fell between the points
        return row.domain, row.domain
    shares = np.array([_TAIL, 1 - _TAIL, _FAR_TAIL, 1 - _FAR_TAIL])
    a, b, c, d = x[np.searchsorted(mass, shares * mass[-1])].tolist()
    return (a, b), (c, d)
