"""The exact solver for kind `shared`: weighted 1-D k-means of the values of f'.

If intervals may share levels, only the values of f' matter, not their positions. Sorted, they give a cost that
satisfies the quadrangle inequality (Wu 1991; Grønlund et al. 2017). Hence the least cost is convex in K, and some
penalty λ per cluster yields K of them (see penalty.py): one O(n log n) programme over the values for each λ that is
tried.

Only if costs tie may no λ yield K. Then one layer per cluster is used: the best cut before i increases with i, so
divide and conquer over i is exact, O(nK log n).
"""

from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .effort import check, uncharged
from .moments import Moments
from .paths import path_to
from .penalty import best_penalty


def solve_shared(moments: Moments, K: int) -> NDArray[np.float64]:
    """Return at most K levels, centred and increasing, that least-squares fit the mean of f' in every cell.

    Exact over the grid. O(n log n) time and O(n) memory unless costs tie; then O(nK log n) and O(nK).
    """
    w, fw = moments.cells[0], moments.cells[1]
    holds = w > 0
    values = fw[holds] / w[holds]
    order = np.argsort(values, kind="stable")
    values, w = values[order], w[holds][order]
    rows = np.stack([w, values * w, values * values * w])
    sums = np.cumsum(rows, axis=1, dtype=np.longdouble).astype(np.float64)
    sums = np.concatenate([np.zeros((3, 1)), sums], axis=1)
    K = min(K, values.size)
    cuts = _cuts_by_penalty(sums, K)
    if cuts is None:
        cuts = _cuts_by_layers(sums, K)
    mass, integral = np.diff(sums[:2, cuts], axis=1)
    holds = mass > 0  # a mass is lost beside one 10¹⁶ times larger
    return np.unique(integral[holds] / mass[holds])


def _cuts_by_penalty(sums: NDArray[np.float64], K: int) -> NDArray[np.int64] | None:
    """Return, (K + 1,), where the best K clusters begin, and the end of the last; None if no λ yields K.

    λ is searched on increasingly fine grids.
    """
    w, fw, f2 = sums[:, -1]
    most = max(float(f2 - fw * fw / w), 0.0)
    if K == 1 or most == 0:
        return None
    n, penalty = sums.shape[1] - 1, None
    for stride in (256, 16, 1):
        if n < 4 * K * stride and stride > 1:
            continue
        chosen = np.append(np.arange(0, n, stride), n)
        programme = partial(_checked_path, np.ascontiguousarray(sums[:, chosen]))
        trial = best_penalty(programme, K, (1e-16 * most, most), penalty)
        penalty = trial.penalty
    return trial.path if trial.path.size == K + 1 else None


def _checked_path(sums: NDArray[np.float64], penalty: float) -> tuple[float, NDArray[np.int64]]:
    check()
    return uncharged(_least_path, sums, penalty)


@njit(cache=True, nogil=True, error_model="numpy")
def _least_path(sums: NDArray[np.float64], penalty: float) -> tuple[float, NDArray[np.int64]]:
    """Return the least cost of any number of clusters, λ added for each, and where they begin and the last ends.

    Of two beginnings of the last cluster the earlier is better for prefixes up to some length, the later for all longer
    ones. So a queue of beginnings, each with the prefix from which it is the best, gives the best one for the next
    prefix: O(n log n) (Galil and Park 1992).
    """
    w, fw, f2 = sums[0], sums[1], sums[2]
    n = w.size - 1
    best = np.zeros(n + 1)
    origin = np.zeros(n + 1, np.int64)
    queue = np.zeros(n + 1, np.int64)  # beginnings
    since = np.ones(n + 1, np.int64)  # the prefix from which each is the best
    head, tail = 0, 0
    for i in range(1, n + 1):
        while head < tail and since[head + 1] <= i:
            head += 1
        j = queue[head]
        best[i] = best[j] + _cost(w, fw, f2, j, i) + penalty
        origin[i] = j
        while tail > head and since[tail] > i:
            t = since[tail]
            if best[i] + _cost(w, fw, f2, i, t) > best[queue[tail]] + _cost(w, fw, f2, queue[tail], t):
                break
            tail -= 1
        j = queue[tail]
        low, high = max(since[tail], i), n + 1  # the later one is no better at `low`, or not yet known to be
        while high - low > 1:
            middle = (low + high) // 2
            if best[i] + _cost(w, fw, f2, i, middle) <= best[j] + _cost(w, fw, f2, j, middle):
                high = middle
            else:
                low = middle
        if high <= n:
            tail += 1
            queue[tail], since[tail] = i, high
    return float(best[n]), path_to(origin, n)


def _cuts_by_layers(sums: NDArray[np.float64], K: int) -> NDArray[np.int64]:
    """Return, (K + 1,), where the best K clusters begin, and the end of the last."""
    n = sums.shape[1] - 1
    previous, start = np.zeros(n + 1), np.zeros((K, n + 1), np.int32)  # where the last cluster of each prefix begins
    for k in range(K):
        check()
        previous = uncharged(_next_layer, sums, previous, start[k], k == 0)
    cuts = np.zeros(K + 1, np.int64)
    cuts[K] = n
    for k in range(K - 1, 0, -1):
        cuts[k] = start[k, cuts[k + 1]]
    return cuts


@njit(cache=True, nogil=True, error_model="numpy")
def _next_layer(
    sums: NDArray[np.float64], previous: NDArray[np.float64], start: NDArray[np.int32], first: bool
) -> NDArray[np.float64]:
    """Return the least cost of every prefix with one cluster more than `previous`; store its beginnings in `start`."""
    w, fw, f2 = sums[0], sums[1], sums[2]
    n = w.size - 1
    current = np.empty(n + 1)
    if first:
        for i in range(n + 1):
            current[i] = _cost(w, fw, f2, 0, i)
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
            total = previous[j] + _cost(w, fw, f2, j, middle)
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


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _cost(w: NDArray[np.float64], fw: NDArray[np.float64], f2: NDArray[np.float64], j: int, i: int) -> float:
    dw = w[i] - w[j]
    dfw = fw[i] - fw[j]
    cost = f2[i] - f2[j] - dfw * dfw / dw if dw > 0.0 else 0.0
    return cost if cost > 0.0 else 0.0
