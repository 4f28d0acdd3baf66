"""The exact solver for kind `interval`: the O(n²K) dynamic programme of the paper (equation 9, Appendix G).

    DP(i, k) = min over j < i of  DP(j, k − 1) + T(j, i)

with T(j, i) the cost of one level over cells j … i − 1. Divide and conquer would be faster but wrong: it requires
a monotonicity of T that fails where f' itself is not monotone (GELU, SiLU).
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .effort import check, uncharged
from .moments import Moments

# The loop below is a minimum of finite numbers: without NaN and signed zeros it compiles to vector code.
_FINITE = {"nnan", "nsz", "ninf"}
_BLOCK = 32
_GRAIN = 1_000_000  # blocks between two checks of the clock: some hundredths of a second


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _cost(w: float, fw: float, f2: float) -> float:
    cost = f2 - fw * fw / w if w > 0.0 else 0.0
    return cost if cost > 0.0 else 0.0


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
    """Fill in a layer from `start` on, for at most `grain` blocks.

    Args:
        prefix: prefix sums of the problem.
        previous: the previous layer.
        current: the layer to fill in.
        start: the first prefix of cells to fill in.
        guess: near the best cut of the previous prefix.
        grain: number of blocks.

    Returns:
        the prefix to continue from, and its guess.
    """
    w, fw, f2 = prefix[0], prefix[1], prefix[2]
    blocks = 0
    for i in range(start, current.size):
        if blocks > grain:
            return i, guess
        wi, fwi, f2i = w[i], fw[i], f2[i]
        # k levels cost no more than k − 1, and no more than with the best cut of the previous prefix.
        least = min(previous[i], previous[guess] + _cost(wi - w[guess], fwi - fw[guess], f2i - f2[guess]))
        # Backwards in blocks. Further left, a cut makes the last level cost more and the levels before it less: so the
        # ends of a block bound the cost of any cut in it from below, and once the last level alone exceeds the least
        # total no cut further left can win. Exact, and closer to O(nK) than to O(n²K) for many levels.
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
    """Return the boundaries of the best path as increasing edge indices; fewer than K − 1 if fewer suffice."""
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
            continue  # this level reduces nothing
        found[count] = at
        count += 1
        i = at
    return found[:count][::-1].copy()


def solve_interval(moments: Moments, K: int) -> NDArray[np.float64]:
    """Return the boundaries, at most K − 1 of the grid's edges, whose K means have the least error.

    Exact over the grid. O(n²K) time, O(nK) memory.

    Raises:
        OutOfTime: the time limit is reached.
    """
    n = moments.prefix.shape[1] - 1
    best = np.zeros((K, n + 1))
    uncharged(_first_layer, moments.prefix, best[0])
    for k in range(1, K):
        i, guess = 1, 0
        while i <= n:
            check()
            i, guess = uncharged(_layer_from, moments.prefix, best[k - 1], best[k], i, guess, _GRAIN)
    return moments.edges[uncharged(_backtrack, moments.prefix, best)]
