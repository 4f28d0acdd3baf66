"""A lower bound on the error of *every* table of one kind with K levels, as close to the best as is asked for.

A table cuts a line with K − 1 boundaries: the line of x for kind `interval`, the line of values of f' for `shared`. Lay
cells over that line. Wherever the boundaries lie, the error is at least the sum over segments of what the *whole* cells
between two boundary cells cost with the best level, plus what the boundary cells themselves cost. In such a cell every
x pays a = (g − y)² to the level on its left or b to the one on its right, so at least min(a, b), and for any ρ ≥ 0

    min(a, b)  ≥  (min(a, ρ) − ρ/2) + (min(b, ρ) − ρ/2)

which charges each side to its own segment, whose two cells tell its level nearly. With ρ the square of half the jump
that q makes there, nothing is lost. So a dynamic programme over boundary cells finds the least sum, and run from both
ends the least sum through each cell; the path of least sum tells the next pass good ρ. A cell whose sum exceeds the
error of the known table holds no boundary of the best one. What is left for every boundary, its window, is cut finer,
and again: the gap falls with the square of the cell. Where a window falls into parts (f' of GELU is symmetric: its
tables have mirror images), each part is followed on its own, and the bound is the least over all.

The arithmetic is double precision with an allowance for its rounding, and g is taken to be monotone in a cell that its
middle does not contradict: a numerical certificate, not one in interval arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ..tables import Kind
from .crossings import cut_by_values
from .moments import Moments, grid

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]

TOLERANCE = 1e-6  # (error − bound) / error to reach
_SPLIT = 2  # parts into which a cell of a window is cut
_GAP = 6  # cells without a candidate that part a window in two
_HEAVY = 0.02  # what a boundary cell may give back, as a part of the error, before it counts as heavy
_EFFORT = 1.5e8  # pairs of places to compare in all: a second or two
_CELL_EFFORT = 400  # pairs that take as long as the moments of a cell
_MAX_CELLS = 200_000
_PASSES = 60
_BRANCHES = 64


@dataclass(frozen=True)
class Cells:
    """Cells of the line that is cut.

    Attributes:
        edges: (n + 1,) increasing.
        prefix: (3, n + 1) integrals of w, gw and g²w from the first edge to every edge.
        low, high: (n,) between which g lies in each cell.
    """

    edges: Vector
    prefix: Vector
    low: Vector
    high: Vector


@dataclass(frozen=True)
class _Windows:
    """For each of the K − 1 boundaries the interval, from edge to edge, in which it may lie."""

    left: Vector
    right: Vector


@dataclass
class _Budget:
    """What may still be spent, in pairs of places compared: counted, not timed, so that results repeat anywhere."""

    left: float


@dataclass(frozen=True)
class _Branch:
    """Windows to be narrowed, on a grid, with a bound that holds for them already."""

    edges: Vector
    windows: _Windows
    bound: float


def table_lower_bound(moments: Moments, kind: Kind, K: int, error: float) -> float:
    """Return a number that the error of no table of `kind` with K levels falls below, at most `error`."""
    cells = max(256, 16 * K)
    if kind == "interval":
        return lower_bound(partial(interval_cells, moments), grid(moments.activation, moments.weight, cells), K, error)
    ends = moments.centred(np.stack([np.nextafter(moments.edges[:-1], np.inf), moments.edges[1:]]))
    margin = 1e-9 * max(1.0, np.abs(ends).max())
    edges = np.linspace(ends.min() - margin, ends.max() + margin, cells + 1)
    return lower_bound(partial(shared_cells, moments), edges, K, error)


def interval_cells(moments: Moments, edges: Vector) -> Cells:
    """Return cells of the x axis; g is taken to be monotone in a cell that its middle does not contradict."""
    sums = np.cumsum(moments.between(edges), axis=1, dtype=np.longdouble).astype(np.float64)
    inner = np.stack([np.nextafter(edges[:-1], np.inf), 0.5 * (edges[:-1] + edges[1:]), edges[1:]])
    g = moments.centred(inner)
    low, high = g[[0, 2]].min(axis=0), g[[0, 2]].max(axis=0)
    turns = (g[1] < low) | (g[1] > high)
    return Cells(
        edges,
        np.concatenate([np.zeros((3, 1)), sums], axis=1),
        np.where(turns, -np.inf, low),
        np.where(turns, np.inf, high),
    )


def shared_cells(moments: Moments, edges: Vector) -> Cells:
    """Return cells of the axis of values g; x counts in the cell that holds g(x)."""
    points, codes = cut_by_values(moments, edges[1:-1])
    ends = moments.edges[[0, -1]]
    per_piece = moments.between(np.concatenate([ends[:1], points, ends[1:]]))
    per_cell = np.stack([np.bincount(codes, weights=row, minlength=edges.size - 1) for row in per_piece])
    sums = np.cumsum(per_cell, axis=1, dtype=np.longdouble).astype(np.float64)
    return Cells(edges, np.concatenate([np.zeros((3, 1)), sums], axis=1), edges[:-1], edges[1:])


def lower_bound(
    cells_of: Callable[[Vector], Cells], edges: Vector, K: int, error: float, tolerance: float = TOLERANCE
) -> float:
    """Return a number that no table's error falls below, at most `error`.

    It stops where (error − bound) / error is at most `tolerance`, or where that would take too long.

    Args:
        cells_of: the problem, as a function from edges to cells.
        edges: of a first grid over all of the line; kinks among them.
        K: levels.
        error: of a known table.
        tolerance: the relative gap to reach.
    """
    if K == 1 or error <= 0:
        return max(error, 0.0)
    whole_line = _Windows(np.full(K - 1, edges[0]), np.full(K - 1, edges[-1]))
    branches = [_Branch(edges, whole_line, 0.0)]
    settled, budget = error, _Budget(_EFFORT)

    def counted(edges: Vector) -> Cells:
        budget.left -= _CELL_EFFORT * edges.size
        return cells_of(edges)

    while branches:
        branch = branches.pop()
        bound, parts = _follow(counted, branch, error, tolerance, budget)
        if parts and len(branches) < _BRANCHES:
            branches += parts
        else:
            settled = min(settled, bound)
    return settled


def _follow(
    cells_of: Callable[[Vector], Cells], branch: _Branch, error: float, tolerance: float, budget: _Budget
) -> tuple[float, list[_Branch]]:
    """Narrow a branch's windows until its bound is good enough, they part, or the budget is spent.

    Returns:
        the bound, and the branch's two parts if it has come to that.
    """
    edges, windows, best = branch.edges, branch.windows, branch.bound
    marks, marked_rho = edges[:1], np.zeros(1)  # ρ at points of the line; in between it is interpolated
    for _ in range(_PASSES):
        if budget.left <= 0:
            break
        cells, rho, heavy, lost, edges = _thinned(cells_of, edges, windows, marks, marked_rho, error, tolerance, budget)
        left, right = np.searchsorted(edges, windows.left), np.searchsorted(edges, windows.right)
        places = _places(heavy)
        first, last = places.begin[left], places.begin[right]
        budget.left -= _pairs(first, last)
        if budget.left <= 0:
            break
        start = np.concatenate([[0], np.cumsum(last - first)])
        rounding = 1e-14 * cells.prefix[2, -1]
        # No path below the error has a segment that costs more than the error and all that sides can give back.
        given_back = first.size * float((np.diff(cells.prefix[0]) * rho).max())
        limit = error + rounding + lost + given_back
        through = _through(
            cells.prefix, cells.low, cells.high, rho, places.stop, places.resume, first, last, start, limit
        )
        layers = list(zip(first, start[:-1], start[1:], strict=True))
        bound = min(through[a:b].min() for _, a, b in layers) - rounding - lost
        best = max(best, min(bound, error))
        if best >= error * (1 - tolerance):
            break
        marks, marked_rho = _half_jumps_squared(cells, places, [int(f + through[a:b].argmin()) for f, a, b in layers])
        keep = through <= error + rounding + lost
        parted = _part(keep, first, start)
        hulls = [_hull(part, places, first, start) for part in (parted or (keep,))]
        narrowed = [_Windows(edges[f], edges[t]) for f, t in hulls]
        if parted:
            return best, [_Branch(edges, part, best) for part in narrowed]
        windows, edges = narrowed[0], _refined(edges, *hulls[0])
        if edges.size > _MAX_CELLS:
            break
    return best, []


def _thinned(
    cells_of: Callable[[Vector], Cells],
    edges: Vector,
    windows: _Windows,
    marks: Vector,
    marked_rho: Vector,
    error: float,
    tolerance: float,
    budget: _Budget,
) -> tuple[Cells, Vector, NDArray[np.bool_], float, Vector]:
    """Return the cells with their ρ, which of them are heavy, what these can cost the bound, and the edges.

    In a heavy cell (an atom: f' is flat for many x) a path could gain more by making a and b small than the error.
    There the cost, linear in how the cell is divided, is least if all of it goes to one side: a boundary on an edge,
    but for what (g − y)² varies in the cell. Heavy cells are cut until that is nothing.
    """
    while True:
        cells = cells_of(edges)
        mass, width = np.diff(cells.prefix[0]), cells.high - cells.low
        rho = np.interp(0.5 * (edges[1:] + edges[:-1]), marks, marked_rho)
        heavy = (mass * rho > _HEAVY * error) & np.isfinite(width)
        rho = np.where(mass * rho > _HEAVY * error, 0.0, rho)
        left, right = np.searchsorted(edges, windows.left), np.searchsorted(edges, windows.right)
        counts = heavy & _covered(left, right, mass.size)
        finite = np.isfinite(width)
        span = cells.high[finite].max() - cells.low[finite].min()
        losses = 2 * span * np.where(counts, mass * np.where(finite, width, 0.0), 0.0)
        lost, enough = float(losses.sum()), 0.05 * tolerance * error
        middle = 0.5 * (edges[:-1] + edges[1:])[losses > 0.5 * enough / max(1, counts.sum())]
        finer = np.union1d(edges, middle)
        # The last: no double lies between the edges of a heavy cell.
        if lost <= enough or finer.size > _MAX_CELLS or finer.size == edges.size or budget.left <= 0:
            return cells, rho, heavy, lost, edges
        edges = finer


def _half_jumps_squared(cells: Cells, places: _Places, boundaries: list[int]) -> tuple[Vector, Vector]:
    """Return, for the table with boundaries at these places, where they lie and half the jumps of q there, squared."""
    left = np.concatenate([[0], places.resume[boundaries]])
    right = np.maximum(left, np.concatenate([places.stop[boundaries], [cells.low.size]]))
    W, FW = cells.prefix[0], cells.prefix[1]
    whole = np.flatnonzero(W[right] > W[left])  # two boundaries in one cell have no level between them
    if whole.size < 2:
        return cells.edges[:1], np.zeros(1)
    level = (FW[right] - FW[left])[whole] / (W[right] - W[left])[whole]
    cell = places.cell[np.array(boundaries)[whole[1:] - 1]]
    return 0.5 * (cells.edges[cell] + cells.edges[cell + 1]), (0.5 * np.diff(level)) ** 2


def _pairs(first: Indices, last: Indices) -> float:
    size = (last - first).astype(float)
    return float(2 * (size[1:] * size[:-1]).sum())


@dataclass(frozen=True)
class _Places:
    """Where a boundary may lie: in a cell, or, beside a heavy cell, on its edge.

    Attributes:
        stop: cells before it are whole in the segment on its left.
        resume: cells from it on are whole in the segment on its right; stop + 1 in a cell, stop on an edge.
        cell: the cell that the place belongs to.
        begin: (n + 1,) places of cell c are begin[c] … begin[c + 1] − 1.
    """

    stop: Indices
    resume: Indices
    cell: Indices
    begin: Indices


def _places(heavy: NDArray[np.bool_]) -> _Places:
    begin = np.concatenate([[0], np.cumsum(1 + heavy)])
    cell = np.repeat(np.arange(heavy.size), 1 + heavy)
    on_left_edge = heavy[cell] & (np.arange(cell.size) == begin[cell])
    stop = np.where(heavy[cell] & ~on_left_edge, cell + 1, cell)
    return _Places(stop, np.where(on_left_edge, cell, cell + 1), cell, begin)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _side(mass: float, rho: float, low: float, high: float, level_low: float, level_high: float) -> float:
    """Return mass · (min(a, ρ) − ρ/2), a the least (g − y)² for g and y in their ranges."""
    apart = max(low - level_high, level_low - high, 0.0)
    return mass * (min(apart * apart, rho) - 0.5 * rho)


@njit(cache=True, nogil=True, error_model="numpy")
def _segment(
    prefix: Vector, low: Vector, high: Vector, rho: Vector, j: int, a: int, b: int, c: int
) -> tuple[float, float]:
    """Return the cost of whole cells a … b − 1, alone and with their sides of boundary cells j … a − 1 and b … c − 1.

    There is at most one boundary cell on each side, and none at an edge or at an end of the line.
    """
    mass_j = prefix[0, a] - prefix[0, j]
    mass_c = prefix[0, c] - prefix[0, b]
    given_back = 0.0
    if mass_j > 0.0:
        given_back += 0.5 * mass_j * rho[j]
    if mass_c > 0.0:
        given_back += 0.5 * mass_c * rho[b]
    w = prefix[0, b] - prefix[0, a]
    if b <= a or not w > 0.0:  # nothing is known of the level: it may fit both boundary cells
        return 0.0, -given_back
    fw = prefix[1, b] - prefix[1, a]
    mean = fw / w
    cost = max(0.0, prefix[2, b] - prefix[2, a] - fw * mean)
    # The level is the mean of the whole cells, moved by what parts of the boundary cells can add.
    up = down = 0.0
    if mass_j > 0.0:
        up += mass_j * max(0.0, high[j] - mean)
        down += mass_j * max(0.0, mean - low[j])
    if mass_c > 0.0:
        up += mass_c * max(0.0, high[b] - mean)
        down += mass_c * max(0.0, mean - low[b])
    level_low, level_high = mean - down / w, mean + up / w
    total = cost
    if mass_j > 0.0:
        total += _side(mass_j, rho[j], low[j], high[j], level_low, level_high)
    if mass_c > 0.0:
        total += _side(mass_c, rho[b], low[b], high[b], level_low, level_high)
    return cost, total


@njit(cache=True, nogil=True, error_model="numpy")
def _through(
    prefix: Vector,
    low: Vector,
    high: Vector,
    rho: Vector,
    stop: Indices,
    resume: Indices,
    first: Indices,
    last: Indices,
    start: Indices,
    limit: float,
) -> Vector:
    """Return for every place of every window the least sum of a path whose boundary lies there.

    Segments that cost more than `limit` before their sides are left out.
    """
    n = low.size
    layers = first.size
    before = np.full(start[-1], np.inf)
    after = np.full(start[-1], np.inf)
    for c in range(first[0], last[0]):
        before[start[0] + c - first[0]] = _segment(prefix, low, high, rho, 0, 0, stop[c], resume[c])[1]
    for k in range(1, layers):
        for c in range(first[k], last[k]):
            least = np.inf
            for j in range(min(c, last[k - 1] - 1), first[k - 1] - 1, -1):
                if j == c:  # two boundaries in one cell: the level between may fit it, its sides' charges are returned
                    cost, total = 0.0, -(prefix[0, resume[c]] - prefix[0, stop[c]]) * rho[min(stop[c], n - 1)]
                else:
                    cost, total = _segment(prefix, low, high, rho, stop[j], resume[j], stop[c], resume[c])
                if cost > limit:
                    break  # the cost only grows from here
                least = min(least, before[start[k - 1] + j - first[k - 1]] + total)
            before[start[k] + c - first[k]] = least
    k = layers - 1
    for c in range(first[k], last[k]):
        after[start[k] + c - first[k]] = _segment(prefix, low, high, rho, stop[c], resume[c], n, n)[1]
    for k in range(layers - 2, -1, -1):
        for c in range(first[k], last[k]):
            least = np.inf
            for j in range(max(c, first[k + 1]), last[k + 1]):
                if j == c:
                    cost, total = 0.0, -(prefix[0, resume[c]] - prefix[0, stop[c]]) * rho[min(stop[c], n - 1)]
                else:
                    cost, total = _segment(prefix, low, high, rho, stop[c], resume[c], stop[j], resume[j])
                if cost > limit:
                    break
                least = min(least, after[start[k + 1] + j - first[k + 1]] + total)
            after[start[k] + c - first[k]] = least
    return before + after


def _hull(keep: NDArray[np.bool_], places: _Places, first: Indices, start: Indices) -> tuple[Indices, Indices]:
    """Return the first and past-the-last cell with a place that is kept, for every window."""
    kept = [np.flatnonzero(keep[start[k] : start[k + 1]]) + first[k] for k in range(first.size)]
    # A window with nothing left belongs to a branch without a better table: its bound is above the error already.
    low = np.array([places.cell[c[0] if c.size else first[k]] for k, c in enumerate(kept)])
    high = np.array([places.cell[c[-1] if c.size else first[k]] + 1 for k, c in enumerate(kept)])
    return low, high


def _part(
    keep: NDArray[np.bool_], first: Indices, start: Indices
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
    """Part the window with the widest gap in two; None where no gap is wide."""
    widest, where = _GAP, None
    for k in range(first.size):
        kept = np.flatnonzero(keep[start[k] : start[k + 1]])
        gaps = np.diff(kept)
        if gaps.size and gaps.max() > max(widest, (kept[-1] - kept[0]) // 8):
            widest, where = gaps.max(), (k, int(kept[gaps.argmax()]) + 1)
    if where is None:
        return None
    k, cut = where
    left, right = keep.copy(), keep.copy()
    left[start[k] + cut : start[k + 1]] = False
    right[start[k] : start[k] + cut] = False
    return left, right


def _covered(first: Indices, last: Indices, n: int) -> NDArray[np.bool_]:
    """Tell which of n cells lie in a window."""
    opened = np.zeros(n + 1, dtype=np.int64)
    np.add.at(opened, first, 1)
    np.add.at(opened, last, -1)
    return np.cumsum(opened)[:-1] > 0


def _refined(edges: Vector, first: Indices, last: Indices) -> Vector:
    """Cut every cell that lies in a window."""
    cut = np.flatnonzero(_covered(first, last, edges.size - 1))
    steps = np.arange(1, _SPLIT) / _SPLIT
    new = edges[cut, None] + (edges[cut + 1] - edges[cut])[:, None] * steps
    return np.union1d(edges, new)
