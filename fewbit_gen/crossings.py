"""Boundaries for given levels: the points where f' passes from one level's neighbourhood into the next.

For given levels, the best q takes at every x the level nearest to f'(x). So boundaries lie where f' crosses the
midpoint of two neighbouring levels, or at a kink where it jumps across one.
"""

import numpy as np
from numpy.typing import NDArray

from .effort import check
from .moments import Moments

Vector = NDArray[np.float64]

# Maximum steps to the last double of a bracket: more than bisection needs for a cell with 2⁷⁰ doubles.
_STEPS = 75
# ITP's κ₁, and the number of steps that it may take beyond bisection's.
_TRUNCATION = 0.2
_SLACK = 3


Indices = NDArray[np.int64]


def repeated(counts: Indices) -> tuple[Indices, Indices]:
    """Return, for cells of so many parts each, the cell of every part, and its number within that cell.

    >>> [part.tolist() for part in repeated(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    cell = np.repeat(np.arange(counts.size), counts)
    return cell, np.arange(cell.size) - np.repeat(np.cumsum(counts) - counts, counts)


def nearest_level_table(moments: Moments, levels: Vector) -> tuple[Vector, NDArray[np.int64]]:
    """Return boundaries and codes of the table that takes the nearest of `levels` on the whole domain of the grid.

    Args:
        moments: the problem; its grid must be fine enough that f' crosses no threshold twice within a cell.
        levels: centred, strictly increasing.
    """
    return cut_by_values(moments, 0.5 * (levels[1:] + levels[:-1]))


def cut_by_values(moments: Moments, thresholds: Vector, tolerance: float = 0.0) -> tuple[Vector, NDArray[np.int64]]:
    """Return where centred f' crosses increasing `thresholds`, and the thresholds that enclose it in each piece.

    A crossing is the last double before it, or a point at most `tolerance` before that.

    Returns:
        points (m − 1,) and codes (m,): in piece i, thresholds[codes[i] − 1] < g ≤ thresholds[codes[i]].
    """
    left, right = moments.cell_ends
    codes = np.searchsorted(thresholds, moments.at_cell_ends, side="left")
    jump = np.flatnonzero(codes[1, :-1] != codes[0, 1:])
    # Each crossing of a threshold within a cell, with the codes before and after it.
    crosses, nth = repeated(np.abs(codes[1] - codes[0]))
    rises = codes[1, crosses] > codes[0, crosses]
    before = np.where(rises, codes[0, crosses] + nth, codes[0, crosses] - nth)
    after = np.where(rises, before + 1, before - 1)
    at = _bisect(moments, left[crosses], right[crosses], thresholds[np.minimum(before, after)], rises, tolerance)
    points = np.concatenate([at, moments.edges[jump + 1]])
    follows = np.concatenate([after, codes[0, jump + 1]])
    # At equal points (a jump right after a crossing) the later cell takes precedence: stable sorting keeps the order.
    order = np.argsort(points, kind="stable")
    points, follows = points[order], follows[order]
    last_of_equal = np.append(points[1:] != points[:-1], True)[: points.size]
    points, follows = points[last_of_equal], follows[last_of_equal]
    sequence = np.concatenate([codes[0, :1], follows])
    changes = np.flatnonzero(sequence[1:] != sequence[:-1])
    return points[changes], np.concatenate([sequence[:1], sequence[1:][changes]])


def sums_by_value(
    moments: Moments, thresholds: Vector, tolerance: float = 0.0
) -> tuple[Vector, NDArray[np.int64], Vector]:
    """Return what `cut_by_values` does, and (3, thresholds + 1) the moments of all x with g between two thresholds."""
    cuts, codes = cut_by_values(moments, thresholds, tolerance)
    pieces = moments.between(np.concatenate([moments.edges[:1], cuts, moments.edges[-1:]]))
    sums = [np.bincount(codes, weights=row, minlength=thresholds.size + 1) for row in pieces]
    return cuts, codes, np.stack(sums, dtype=float)


def near(moments: Moments) -> float:
    """Return the tolerance of a crossing within which lies too little mass to change a mean by its rounding error."""
    return 1e-13 * float(moments.edges[-1] - moments.edges[0])


def _bisect(
    moments: Moments, low: Vector, high: Vector, target: Vector, rising: NDArray[np.bool_], tolerance: float
) -> Vector:
    """Return the last double of each bracket before g passes `target`, or a point at most `tolerance` before that.

    The bracket shrinks by false position, moved slightly towards the middle and kept near enough to it that the
    number of steps exceeds bisection's by a constant at most (ITP, Oliveira and Takahashi 2020).
    """
    found = low.copy()
    sign: Vector = np.where(rising, 1.0, -1.0)
    g_low: Vector = sign * (moments.centred(low) - target)
    g_high: Vector = sign * (moments.centred(high) - target)
    pending = np.arange(low.size)
    low, high, width = low.copy(), high.copy(), high - low
    for step in range(_STEPS):
        check()
        middle = low + 0.5 * (high - low)
        inside = (middle > low) & (middle < high) & (high - low > tolerance)
        if not inside.all():
            found[pending[~inside]] = low[~inside]
            pending = pending[inside]
            low, high, width, target = low[inside], high[inside], width[inside], target[inside]
            sign, middle, g_low, g_high = sign[inside], middle[inside], g_low[inside], g_high[inside]
        if not pending.size:
            break
        x = _next_point(low, high, middle, g_low, g_high, width, step)
        g = sign * (moments.centred(x) - target)
        # At a rising threshold the threshold's own value belongs before the crossing; at a falling one, after it.
        beyond = np.where(sign > 0, g > 0, g >= 0)
        high, g_high = np.where(beyond, x, high), np.where(beyond, g, g_high)
        low, g_low = np.where(beyond, low, x), np.where(beyond, g_low, g)
    found[pending] = low
    return found


def _next_point(
    low: Vector, high: Vector, middle: Vector, g_low: Vector, g_high: Vector, width: Vector, step: int
) -> Vector:
    """Return the point of ITP's next evaluation, strictly inside each bracket; `width` is the first bracket's."""
    rise = g_high - g_low
    false_position = np.where(rise > 0, (low * g_high - high * g_low) / np.where(rise > 0, rise, 1), middle)
    towards = np.sign(middle - false_position)
    moved = np.minimum(_TRUNCATION * (high - low) ** 2 / width, np.abs(middle - false_position))
    slack = np.maximum(width * 2.0 ** (_SLACK - step) - 0.5 * (high - low), 0.0)
    x = np.clip(false_position + towards * moved, middle - slack, middle + slack)
    return np.where((x > low) & (x < high), x, middle)
