"""The exact solver for kind `shared`: weighted 1-D k-means of the values of f'.

Where intervals may share levels only the values of f' matter, not where they are taken. Sorted, they make a
cost that satisfies the quadrangle inequality, so the best cut before i moves right with i and divide and
conquer is exact (Wu 1991; Grønlund et al. 2017): O(nK log n).
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .moments import Moments


@njit(cache=True, nogil=True, error_model="numpy")
def _cost(w: NDArray[np.float64], fw: NDArray[np.float64], f2: NDArray[np.float64], j: int, i: int) -> float:
    dw = w[i] - w[j]
    dfw = fw[i] - fw[j]
    cost = f2[i] - f2[j] - dfw * dfw / dw if dw > 0.0 else 0.0
    return cost if cost > 0.0 else 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def _layers(
    w: NDArray[np.float64], fw: NDArray[np.float64], f2: NDArray[np.float64], K: int
) -> tuple[float, NDArray[np.int32]]:
    """Return the least cost of K clusters and, (K, n + 1), where the last cluster of each prefix begins."""
    n = w.size - 1
    previous = np.empty(n + 1)
    for i in range(n + 1):
        previous[i] = _cost(w, fw, f2, 0, i)
    start = np.zeros((K, n + 1), np.int32)
    current = np.empty(n + 1)
    stack = np.empty((64, 4), np.int64)  # halves of halves: depth log₂ n
    for k in range(1, K):
        stack[0] = (0, n, 0, n)
        depth = 1
        while depth > 0:
            depth -= 1
            low, high, first, last = stack[depth]
            middle = (low + high) // 2
            least = np.inf
            at = first
            for j in range(first, min(middle, last) + 1):
                total = previous[j] + _cost(w, fw, f2, j, middle)
                if total < least:
                    least = total
                    at = j
            current[middle] = least
            start[k, middle] = at
            if low < middle:
                stack[depth] = (low, middle - 1, first, at)
                depth += 1
            if middle < high:
                stack[depth] = (middle + 1, high, at, last)
                depth += 1
        previous[:] = current
    return previous[n], start


@dataclass(frozen=True)
class Clusters:
    """The best K clusters of the cells of a grid by their mean derivative.

    Attributes:
        levels: increasing centred values, at most K of them.
        error: the error over cell means, without what f' varies within cells.
    """

    levels: NDArray[np.float64]
    error: float


def solve_shared(moments: Moments, K: int) -> Clusters:
    """Return the K levels that least-squares fit the mean of f' in every cell; exact over the grid.

    O(nK log n) time, O(nK) memory.
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
    error, start = _layers(sums[0], sums[1], sums[2], K)
    levels = []
    end = values.size
    for k in range(K - 1, -1, -1):
        begin = int(start[k, end]) if k else 0
        if end > begin:
            levels.append((sums[1, end] - sums[1, begin]) / (sums[0, end] - sums[0, begin]))
        end = begin
    return Clusters(np.unique(levels), float(error))


def shared_lower_bound(moments: Moments, error: float) -> float:
    """Return what the error of no `shared` table falls below, given the solver's `error` over cell means.

    Let v be f' replaced by its mean in every cell and V = ∫ (f' − v)² w. Distances to a set of levels are
    1-Lipschitz, so by Minkowski's inequality √error(v) ≤ √error(f') + √V for every set of levels, hence for
    the best.
    """
    w, fw, f2 = moments.cells
    within = np.where(w > 0, f2 - fw * fw / np.where(w > 0, w, 1), 0.0)
    deviation = np.sqrt(np.maximum(within, 0).sum())
    return float(max(0.0, np.sqrt(max(error, 0.0)) - deviation) ** 2)
