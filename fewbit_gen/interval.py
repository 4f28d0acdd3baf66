"""The exact solver for kind `interval`: the O(n²K) dynamic programme of the paper (equation 9, Appendix G).

    DP(i, k) = min over j < i of  DP(j, k − 1) + T(j, i)

with T(j, i) the cost of one level over cells j … i − 1. Divide and conquer would be faster and wrong: it
needs T to be monotone in a way that it is not where f' itself is not monotone (GELU, SiLU).
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .effort import check, uncharged
from .moments import Moments

# The loop below is a minimum of finite numbers: without NaN and signed zeros it compiles to vector code.
_FINITE = {"nnan", "nsz", "ninf"}
_BLOCK = 32
_GRAIN = 1_000_000  # blocks between two looks at the clock: some hundredths of a second


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _cost(w: float, fw: float, f2: float) -> float:
    cost = f2 - fw * fw / w if w > 0.0 else 0.0
    return cost if cost > 0.0 else 0.0


def _layers(prefix: NDArray[np.float64], K: int) -> NDArray[np.float64]:
    """Return DP, (K, n + 1): row k − 1 holds the least cost of cells 0 … i − 1 with k levels.

    Raises:
        OutOfTime: it takes longer than it may.
    """
    n = prefix.shape[1] - 1
    best = np.zeros((K, n + 1))
    uncharged(_first_layer, prefix, best[0])
    for k in range(1, K):
        i, guess = 1, 0
        while i <= n:
            check()
            i, guess = uncharged(_layer_from, prefix, best[k - 1], best[k], i, guess, _GRAIN)
    return best


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _first_layer(prefix: NDArray[np.float64], first: NDArray[np.float64]) -> None:
    for i in range(1, first.size):
        first[i] = _cost(prefix[0, i], prefix[1, i], prefix[2, i])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _layer_from(
    prefix: NDArray[np.float64],
    previous: NDArray[np.float64],
    current: NDArray[np.float64],
    start: int,
    guess: int,
    grain: int,
) -> tuple[int, int]:
    """Fill in a layer from `start` on, until `grain` blocks are done.

    Args:
        prefix: of the problem.
        previous: the layer before.
        current: the layer.
        start: the first prefix of cells to fill in.
        guess: near where the prefix before was cut.
        grain: blocks.

    Returns:
        the prefix to go on from, and its guess.
    """
    w, fw, f2 = prefix[0], prefix[1], prefix[2]
    blocks = 0
    for i in range(start, current.size):
        if blocks > grain:
            return i, guess
        wi, fwi, f2i = w[i], fw[i], f2[i]
        # k levels do no worse than k − 1, nor than the best cut of the prefix before.
        least = min(previous[i], previous[guess] + _cost(wi - w[guess], fwi - fw[guess], f2i - f2[guess]))
        # Backwards in blocks. The further left a cut lies the more the last level costs, and the less those before:
        # so the ends of a block tell how little a cut in it may cost, and once the last level alone exceeds the
        # least total no cut beyond can win. Exact, and nearer to O(nK) than to O(n²K) where levels are many.
        high = i
        while high > 0:
            blocks += 1
            low = max(0, high - _BLOCK)
            if previous[low] + _cost(wi - w[high - 1], fwi - fw[high - 1], f2i - f2[high - 1]) < least:
                block = least
                for j in range(low, high):
                    dw = wi - w[j]
                    dfw = fwi - fw[j]
                    segment = (f2i - f2[j]) - dfw * dfw / dw if dw > 0.0 else 0.0
                    segment = segment if segment > 0.0 else 0.0
                    total = previous[j] + segment
                    block = total if total < block else block
                if block < least:
                    least, guess = block, (low + high) // 2
            if _cost(wi - w[low], fwi - fw[low], f2i - f2[low]) >= least:
                break
            high = low
        current[i] = least
    return current.size, guess


@njit(cache=True, nogil=True, error_model="numpy")
def _backtrack(prefix: NDArray[np.float64], best: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the best path's boundaries as edge indices, increasing; fewer than K − 1 if fewer suffice."""
    K, n = best.shape[0], best.shape[1] - 1
    found = np.empty(K - 1, np.int64)
    count = 0
    i = n
    for k in range(K - 1, 0, -1):
        least = np.inf
        at = -1
        for j in range(1, i):
            total = best[k - 1, j] + _cost(
                prefix[0, i] - prefix[0, j], prefix[1, i] - prefix[1, j], prefix[2, i] - prefix[2, j]
            )
            if total < least:
                least = total
                at = j
        if at < 0 or best[k - 1, i] <= least:
            continue  # this level buys nothing
        found[count] = at
        count += 1
        i = at
    return found[:count][::-1].copy()


def solve_interval(moments: Moments, K: int) -> NDArray[np.float64]:
    """Return the boundaries, at most K − 1 of the grid's edges, whose K means have the least error.

    Exact over the grid. O(n²K) time, O(nK) memory.

    Raises:
        OutOfTime: it takes longer than it may.
    """
    best = _layers(moments.prefix, K)
    return moments.edges[uncharged(_backtrack, moments.prefix, best)]
