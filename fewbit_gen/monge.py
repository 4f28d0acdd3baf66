"""The best division of a line of values into K segments whose costs satisfy the quadrangle inequality.

    shared        cost = ∫ g² − (∫ g)² / ∫ 1                   one level serves the segment: weighted 1-D k-means
    stochastic    cost = ∫ (e_i − g)(g − e_j)                  values are rounded at random to the segment's two ends

(Wu 1991; Grønlund et al. 2017; for rounding, QUIVER, Ben Basat et al. 2024.) Hence the least cost is convex in K, and
some penalty λ per segment yields K of them (see penalty.py): one O(n log n) programme over the values for each λ that
is tried.

Only if costs tie may no λ yield K. Then one layer per segment is used: the best cut before i increases with i, so
divide and conquer over i is exact, O(nK log n).

`sums` holds the problem: rows W, FW and F², the integrals of w, gw and g²w up to each place; for kind `stochastic` also
the place's value e, and a reward for a cut there, 0 at both ends.
"""

from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .effort import check, uncharged
from .paths import path_to
from .penalty import Trial, best_penalty, greatest_bound

Vector = NDArray[np.float64]

W, FW, F2, VALUE, REWARD = range(5)  # rows of `sums`
_ENDS = 5  # rows of a problem whose segments cost by their ends


def prefix(per_cell: Vector) -> Vector:
    """Return the integrals up to each place, (rows, n + 1), of those over cells, (rows, n)."""
    sums = np.cumsum(per_cell, axis=1, dtype=np.longdouble).astype(np.float64)
    return np.concatenate([np.zeros((per_cell.shape[0], 1)), sums], axis=1)


def best_cuts(sums: Vector, K: int) -> NDArray[np.int64]:
    """Return, (K + 1,), where the best K segments begin, and the end of the last; K is at most the number of cells."""
    trial = trial_of(sums, K)
    if trial is not None and trial.path.size == K + 1:
        return trial.path
    n = sums.shape[1] - 1
    previous, start = np.zeros(n + 1), np.zeros((K, n + 1), np.int32)  # where the last segment of each prefix begins
    for k in range(K):
        check()
        previous = uncharged(_next_layer, sums, previous, start[k], k == 0)
    cuts = np.zeros(K + 1, np.int64)
    cuts[K] = n
    for k in range(K - 1, 0, -1):
        cuts[k] = start[k, cuts[k + 1]]
    return cuts


def trial_of(sums: Vector, K: int) -> Trial | None:
    """Return the best λ's result, whose bound no division into K segments is below; None if every division costs 0.

    λ is searched on increasingly fine grids.
    """
    n = sums.shape[1] - 1
    most = float(_cost(sums, 0, n))
    if K == 1 or most == 0:
        return None
    trial, penalty = None, None
    for stride in (256, 16, 1):
        if n < 4 * K * stride and stride > 1:
            continue
        chosen = np.append(np.arange(0, n, stride), n)
        programme = partial(_checked_path, np.ascontiguousarray(sums[:, chosen]))
        trial = best_penalty(programme, K, (1e-16 * most, most), penalty)
        penalty = trial.penalty
    if trial is not None and trial.path.size != K + 1:
        trial = greatest_bound(partial(_checked_path, sums), K, trial)
    return trial


def _checked_path(sums: Vector, penalty: float) -> tuple[float, NDArray[np.int64]]:
    least, origin = least_sums(sums, penalty)
    return float(least[-1]), path_to(origin, origin.size - 1)


def least_sums(sums: Vector, penalty: float) -> tuple[Vector, NDArray[np.int64]]:
    """Return the least cost of any number of segments up to each place, λ added for each, and where the last begins.

    Raises:
        OutOfTime: the time limit is reached.
    """
    check()
    return uncharged(_least_sums, sums, penalty)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _cost(sums: Vector, j: int, i: int) -> float:
    """Return the cost of the segment from place j to place i."""
    dw = sums[W, i] - sums[W, j]
    dfw = sums[FW, i] - sums[FW, j]
    df2 = sums[F2, i] - sums[F2, j]
    if sums.shape[0] == _ENDS:
        a, b = sums[VALUE, j], sums[VALUE, i]
        cost = (a + b) * dfw - a * b * dw - df2
    else:
        cost = df2 - dfw * dfw / dw if dw > 0.0 else 0.0
    return cost if cost > 0.0 else 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def _least_sums(sums: Vector, penalty: float) -> tuple[Vector, NDArray[np.int64]]:
    """Return what `least_sums` does.

    Of two beginnings of the last segment the earlier is better for prefixes up to some length, the later for all longer
    ones. So a queue of beginnings, each with the prefix from which it is the best, gives the best one for the next
    prefix: O(n log n) (Galil and Park 1992).
    """
    n = sums.shape[1] - 1
    best = np.zeros(n + 1)
    origin = np.zeros(n + 1, np.int64)
    queue = np.zeros(n + 1, np.int64)  # beginnings
    since = np.ones(n + 1, np.int64)  # the prefix from which each is the best
    head, tail = 0, 0
    for i in range(1, n + 1):
        while head < tail and since[head + 1] <= i:
            head += 1
        j = queue[head]
        best[i] = best[j] + _cost(sums, j, i) + penalty
        if sums.shape[0] == _ENDS:
            best[i] -= sums[REWARD, i]
        origin[i] = j
        while tail > head and since[tail] > i:
            t = since[tail]
            if best[i] + _cost(sums, i, t) > best[queue[tail]] + _cost(sums, queue[tail], t):
                break
            tail -= 1
        j = queue[tail]
        low, high = max(since[tail], i), n + 1  # the later one is no better at `low`, or not yet known to be
        while high - low > 1:
            middle = (low + high) // 2
            if best[i] + _cost(sums, i, middle) <= best[j] + _cost(sums, j, middle):
                high = middle
            else:
                low = middle
        if high <= n:
            tail += 1
            queue[tail], since[tail] = i, high
    return best, origin


@njit(cache=True, nogil=True, error_model="numpy")
def _next_layer(sums: Vector, previous: Vector, start: NDArray[np.int32], first: bool) -> Vector:
    """Return the least cost of every prefix with one segment more than `previous`; store its beginnings in `start`."""
    n = sums.shape[1] - 1
    current = np.empty(n + 1)
    if first:
        for i in range(n + 1):
            current[i] = _cost(sums, 0, i)
        return current
    stack = np.empty((64, 4), np.int64)  # halves of halves: depth log₂ n
    stack[0] = (0, n, 0, n)
    depth = 1
    while depth > 0:
        depth -= 1
        low, high, begin, last = stack[depth]
        middle = (low + high) // 2
        least = np.inf
        at = begin
        for j in range(begin, min(middle, last) + 1):
            total = previous[j] + _cost(sums, j, middle)
            if total < least:
                least = total
                at = j
        current[middle] = least
        start[middle] = at
        if low < middle:
            stack[depth] = (low, middle - 1, begin, at)
            depth += 1
        if middle < high:
            stack[depth] = (middle + 1, high, at, last)
            depth += 1
    return current
