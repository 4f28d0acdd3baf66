"""The exact solver for kind `shared`: weighted 1-D k-means of the values of f'.

Where intervals may share levels only the values of f' matter, not where they are taken. Sorted, they make a cost that
satisfies the quadrangle inequality. So the best cut before i moves right with i, and divide and conquer over i is exact
(Wu 1991; Grønlund et al. 2017): O(nK log n). It moves right with the number of clusters too, and with many clusters by
little, which leaves most halvings a range of a few places to search.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .moments import Moments

# The loop below is a minimum of finite numbers: without NaN and signed zeros it compiles to vector code.
_FINITE = {"nnan", "nsz", "ninf"}
_BLOCK = 32
_FAR = 1e300
_FEW = 8  # prefixes that are searched one after the other
_WORTH_A_THREAD = 50_000  # prefixes


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _rows(
    sums: NDArray[np.float64],
    previous: NDArray[np.float64],
    before: NDArray[np.int32],
    current: NDArray[np.float64],
    start: NDArray[np.int32],
    low: int,
    high: int,
    first: int,
    last: int,
) -> None:
    """Write, for prefixes of low … high values, the least cost of one cluster more and where that cluster begins.

    Args:
        sums: (3, n + 1) integrals of w, vw and v²w over prefixes.
        previous: (n + 1,) the least cost with the clusters so far, and `before` where the last of them begins.
        current, start: (n + 1,) what is written.
        low, high: the prefixes to do.
        first, last: between which the cluster of each of them begins.
    """
    w, fw, f2 = sums[0], sums[1], sums[2]
    stack = np.empty((64, 4), np.int64)  # halves of halves: depth log₂ n
    stack[0] = (low, high, first, last)
    depth = 1
    while depth > 0:
        depth -= 1
        low, high, first, last = stack[depth]
        if high - low < _FEW:
            at = first
            for i in range(low, high + 1):
                wi, fwi, f2i = w[i], fw[i], f2[i]
                end = min(i, last)
                least = _FAR
                for j in range(min(max(at, before[i]), end), end + 1):
                    dw = wi - w[j]
                    dfw = fwi - fw[j]
                    cost = f2i - f2[j] - dfw * dfw / dw if dw > 0.0 else 0.0
                    total = previous[j] + (cost if cost > 0.0 else 0.0)
                    if total < least:
                        least, at = total, j
                current[i] = least
                start[i] = at
            continue
        middle = (low + high) // 2
        wi, fwi, f2i = w[middle], fw[middle], f2[middle]
        end = min(middle, last) + 1
        begin = min(max(first, before[middle]), end - 1)  # rounding may part what would be in order
        # Left of a place the clusters so far cost less, right of it the last one does: most blocks need no look inside.
        guess = min(max((first + last) // 2, begin), end - 1)
        dw, dfw = wi - w[guess], fwi - fw[guess]
        cost = f2i - f2[guess] - dfw * dfw / dw if dw > 0.0 else 0.0
        least, block = previous[guess] + max(cost, 0.0), guess
        for b in range(begin, end, _BLOCK):
            stop = min(b + _BLOCK, end)
            dw, dfw = wi - w[stop - 1], fwi - fw[stop - 1]
            cost = f2i - f2[stop - 1] - dfw * dfw / dw if dw > 0.0 else 0.0
            if previous[b] + max(cost, 0.0) > least:
                continue
            least_here = _FAR
            for j in range(b, stop):
                dw = wi - w[j]
                dfw = fwi - fw[j]
                cost = f2i - f2[j] - dfw * dfw / dw if dw > 0.0 else 0.0
                total = previous[j] + (cost if cost > 0.0 else 0.0)
                least_here = total if total < least_here else least_here
            if least_here <= least:
                least, block = least_here, b
        at = block
        nearest = _FAR
        for j in range(block, min(block + _BLOCK, end)):
            dw = wi - w[j]
            dfw = fwi - fw[j]
            cost = f2i - f2[j] - dfw * dfw / dw if dw > 0.0 else 0.0
            total = previous[j] + (cost if cost > 0.0 else 0.0)
            if total < nearest:
                nearest, at = total, j
        current[middle] = least
        start[middle] = at
        if low < middle:
            stack[depth] = (low, middle - 1, first, at)
            depth += 1
        if middle < high:
            stack[depth] = (middle + 1, high, at, last)
            depth += 1


def _layers(sums: NDArray[np.float64], K: int) -> NDArray[np.int32]:
    """Return, (K, n + 1), where the last of the best k + 1 clusters of each prefix begins."""
    n = sums.shape[1] - 1
    start = np.zeros((K, n + 1), np.int32)
    w, fw, f2 = sums
    previous = np.maximum(f2 - fw * fw / np.where(w > 0, w, 1), 0.0)
    current = np.empty(n + 1)
    parts = min(os.cpu_count() or 1, n // _WORTH_A_THREAD) or 1
    fence = np.linspace(-1, n, parts + 1).astype(int).tolist()  # the last prefix of every part
    with ThreadPoolExecutor(parts) as pool:
        for k in range(1, K):
            arrays = (sums, previous, start[k - 1], current, start[k])
            ends = [0]
            for i in fence[1:]:  # each part's last prefix tells the next where to search
                _rows(*arrays, i, i, ends[-1], n)
                ends.append(int(start[k, i]))
            spans = zip(fence[:-1], fence[1:], ends[:-1], ends[1:], strict=True)
            tasks = [pool.submit(_rows, *arrays, a + 1, b - 1, first, last) for a, b, first, last in spans if b > a + 1]
            for task in tasks:
                task.result()
            previous, current = current, previous
    return start


def solve_shared(moments: Moments, K: int) -> NDArray[np.float64]:
    """Return the levels, centred and increasing, at most K, that least-squares fit the mean of f' in every cell.

    Exact over the grid. O(nK log n) time, O(nK) memory.
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
    start = _layers(sums, K)
    levels = []
    end = values.size
    for k in range(K - 1, -1, -1):
        begin = int(start[k, end]) if k else 0
        mass = sums[0, end] - sums[0, begin]
        if mass > 0:  # it may be lost beside a mass 10¹⁶ times larger
            levels.append((sums[1, end] - sums[1, begin]) / mass)
        end = begin
    return np.unique(levels)
