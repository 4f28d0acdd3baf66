"""Edges along the line, and the cells between them that may still contain a boundary of the best table.

A boundary is moved to the nearest edge. The maximum cost of that, its loss, is computed cell by cell; a mesh is refined
until the loss is small enough, and closed where no boundary can be.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..crossings import near, repeated, sums_by_value
from ..effort import check
from ..moments import Moments
from ..monge import prefix

Indices = NDArray[np.int64]

MAX_CELLS = 2_000_000


Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cells:
    """Moments and ranges between neighbouring points of the line.

    Attributes:
        prefix: (3, n + 1) integrals of w, gw and g²w from the first point to every point.
        low, high: (n,) bounds of g in each cell.
        monotone: (n,) whether g goes monotonically from one of these to the other.
    """

    prefix: Vector
    low: Vector
    high: Vector
    monotone: Mask


def interval_cells(moments: Moments, points: Vector) -> Cells:
    """Return cells of the x axis."""
    inner = 0.5 * (points[:-1] + points[1:])
    quarters = np.stack([np.nextafter(points[:-1], np.inf), 0.5 * (points[:-1] + inner), inner,
                         0.5 * (inner + points[1:]), points[1:]])  # fmt: skip
    g = moments.centred(quarters)
    steps = np.diff(g, axis=0)
    monotone = np.logical_or((steps >= 0).all(axis=0), (steps <= 0).all(axis=0))
    low, high = g.min(axis=0), g.max(axis=0)
    beyond = np.where(monotone, 0.0, high - low)  # a turn between samples goes no further
    return Cells(prefix(moments.between(points)), low - beyond, high + beyond, monotone)


def shared_cells(moments: Moments, points: Vector) -> Cells:
    """Return cells of the axis of values g; x belongs to the cell that contains g(x)."""
    *_, per_cell = sums_by_value(moments, points[1:-1], near(moments))
    return Cells(prefix(per_cell), points[:-1], points[1:], np.ones(points.size - 1, dtype=np.bool_))


@dataclass(frozen=True)
class Problem:
    """The problem to bound.

    Attributes:
        cells_of: returns the cells between increasing points of the line.
        edges: edges of the first mesh over the whole line, including the jumps of g and w.
        K: number of levels.
        error: of a known table.
        jump: maps points to the distance of the known table's levels there. It affects the mesh only.
        span: range of g.
        rounding: bound of the error of a table due to rounding in sums of mass.
    """

    cells_of: Callable[[Vector], Cells]
    edges: Vector
    K: int
    error: float
    jump: Callable[[Vector], Vector]
    span: tuple[float, float]
    rounding: float = 0.0


@dataclass(frozen=True)
class Mesh:
    """Edges, and the cells between them that may contain a boundary of the best table.

    Attributes:
        edges: (n + 1,) increasing.
        open: (n,) whether a cell may contain one.
    """

    edges: Vector
    open: Mask

    @property
    def places(self) -> Mask:
        """(n + 1,) the edges to which a boundary may have been moved: those beside an open cell."""
        return np.append(self.open, False) | np.append(False, self.open)


def places_of(problem: Problem, mesh: Mesh) -> tuple[Vector, Vector]:
    """Return the places of `mesh`, (9, P + 2), and the larger loss of each cell's two halves, 0 if it is closed."""
    middles = 0.5 * (mesh.edges[:-1] + mesh.edges[1:])
    real = mesh.open & (middles > mesh.edges[:-1]) & (middles < mesh.edges[1:])  # no double between the edges otherwise
    points = np.concatenate([mesh.edges, middles[real]])
    order = np.argsort(points, kind="stable")
    points = points[order]
    at = np.empty(points.size, np.int64)
    at[order] = np.arange(points.size)
    at = at[: mesh.edges.size]  # index of each edge among the points
    cells = problem.cells_of(points)
    W, FW = np.maximum(np.diff(cells.prefix[0]), 0.0), np.diff(cells.prefix[1])
    turned = (cells.high - cells.low) * W
    straight = np.clip(np.maximum(FW - cells.low * W, cells.high * W - FW), 0.0, turned)
    loss = np.where(cells.monotone, straight, turned)

    n = mesh.open.size
    halves = np.zeros((4, n + 1, 2))  # loss, mass, low, high of the half on the left and on the right of every edge
    halves[2], halves[3] = np.inf, -np.inf
    for side, edge, half in ((1, np.flatnonzero(mesh.open), at[:-1]), (0, np.flatnonzero(mesh.open) + 1, at[1:] - 1)):
        cell = half[mesh.open]
        halves[:, edge, side] = loss[cell], W[cell], cells.low[cell], cells.high[cell]
    of_cell = np.where(mesh.open, np.maximum(halves[0, :-1, 1], halves[0, 1:, 0]), 0.0)

    place = np.flatnonzero(mesh.places)
    point = at[place]
    bounds = np.concatenate([[0], point, [points.size - 1]])
    low, high = halves[2, place].min(axis=1), halves[3, place].max(axis=1)
    # A closed cell may be too wide for its samples to bound g in it.
    shut = np.repeat(~mesh.open, np.diff(at))
    gap_low = _ranges(np.where(shut, problem.span[0], cells.low), bounds, np.minimum)
    gap_high = _ranges(np.where(shut, problem.span[1], cells.high), bounds, np.maximum)
    gap_low, gap_high = np.append(gap_low[:1], gap_low), np.append(gap_high[:1], gap_high)  # no gap before the first
    ends = np.zeros(1)
    rows = (
        np.concatenate([gap_low[1:2], low, gap_low[-1:]]),
        np.concatenate([gap_high[1:2], high, gap_high[-1:]]),
        gap_low,
        gap_high,
        np.concatenate([ends, halves[0, place].max(axis=1), ends]),
        np.concatenate([ends, halves[1, place].max(axis=1), ends]),
    )
    return np.concatenate([cells.prefix[:, bounds], rows]), of_cell


def _ranges(values: Vector, bounds: Indices, reduce: np.ufunc) -> Vector:
    """Return the least or greatest of `values` from each of `bounds` to the next; if empty, the neighbour's."""
    start = np.minimum(bounds[:-1], values.size - 1)
    reduced = reduce.reduceat(values, start) if start.size else start
    # reduceat extends the last range to the end and returns values[start] for an empty one: both as required.
    return np.asarray(reduced, dtype=np.float64)


def _merged(opened: Mask, keep: Mask) -> Mask:
    """Return the open flags after removing the edges not in `keep`: a merged cell is open if one of its parts is."""
    return np.logical_or.reduceat(opened, np.flatnonzero(keep[:-1]))


def cut_to_loss(problem: Problem, mesh: Mesh, allowed: float) -> tuple[Mesh, Vector]:
    """Split the open cells until moving a boundary within one costs at most `allowed`, by the known table's jumps."""
    while True:
        check()
        places, loss = places_of(problem, mesh)
        middle = 0.5 * (mesh.edges[:-1] + mesh.edges[1:])
        over = 2 * problem.jump(middle) * loss / allowed
        halvings = np.where(mesh.open & (over > 1), np.ceil(0.5 * np.log2(np.maximum(over, 1.0))), 0.0)
        splittable = (middle > mesh.edges[:-1]) & (middle < mesh.edges[1:])
        parts = np.where(splittable, 2 ** np.clip(halvings, 0, 6).astype(np.int64), 1)
        if (parts == 1).all() or parts.sum() > MAX_CELLS:
            return mesh, places
        cell, nth = repeated(parts)
        left, right = mesh.edges[cell], mesh.edges[cell + 1]
        edges = np.append(left + (right - left) * (nth / parts[cell]), mesh.edges[-1:])
        keep = np.append(True, edges[1:] > edges[:-1])  # drops duplicates where there are too few doubles between edges
        mesh = Mesh(edges[keep], _merged(mesh.open[cell], keep))


def narrowed(mesh: Mesh, alive: Mask) -> tuple[Mesh, Indices]:
    """Close the halves of open cells beside edges that are not alive, and remove edges between closed cells.

    Returns:
        the mesh, and for each of its edges its index in the old mesh; −1 for a midpoint.
    """
    half_alive = mesh.open & (alive[:-1] != alive[1:])
    parts = 1 + half_alive.astype(np.int64)
    cell = np.repeat(np.arange(parts.size), parts)
    second = np.append(False, cell[1:] == cell[:-1])
    edges = np.append(
        np.where(second, 0.5 * (mesh.edges[cell] + mesh.edges[cell + 1]), mesh.edges[cell]), mesh.edges[-1]
    )
    whole = mesh.open & alive[:-1] & alive[1:]
    opened = whole[cell] | (half_alive[cell] & np.where(second, alive[cell + 1], alive[cell]))
    source = np.append(np.where(second, -1, cell), parts.size)
    distinct = np.append(True, edges[1:] > edges[:-1])
    needed = np.append(opened, True) | np.append(True, opened)
    keep = distinct & needed
    return Mesh(edges[keep], _merged(opened, keep)), source[keep]
