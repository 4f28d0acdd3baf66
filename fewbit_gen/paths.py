"""Dynamic programmes over the edges where a boundary may lie, from one end of the line to the other.

Their input is one array, `places`, (9, P + 2): a column for each of those edges and for both ends of the line.
(A single array, because a compiled function maintains a reference count for each array argument.)
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .effort import check, uncharged

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]

# Its rows.
W, FW, F2 = 0, 1, 2  # integrals of w, gw, g²w from the first point
LOW, HIGH = 3, 4  # bounds of g wherever a boundary may have been moved from
GAP_LOW, GAP_HIGH = 5, 6  # bounds of g from the previous place to this one
LOSS = 7  # upper bound of ∫ |g − g(s)| w from a boundary s to this place
MASS = 8  # upper bound of ∫ w from a boundary to this place


_BLOCK = 32
# The loops below are minima of finite numbers: without NaN and signed zeros they compile to vector code.
_FINITE = {"nnan", "nsz", "ninf"}
_FAR = 1e300
_GRAIN = 20_000_000  # steps between two checks of the clock: some hundredths of a second


def reversed_places(places: Vector) -> Vector:
    """Return the places of the line in reverse order."""
    sums = (places[:LOW, -1:] - places[:LOW])[:, ::-1]
    gaps = places[GAP_LOW : GAP_HIGH + 1]
    gaps = np.concatenate([gaps[:, :1], gaps[:, :0:-1]], axis=1)
    return np.concatenate([sums, places[LOW : HIGH + 1, ::-1], gaps, places[LOSS:, ::-1]])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE, forceinline=True)
def _sides(q: int, p: int, places: Vector) -> float:
    """Return an upper bound of the cost reduction of segment q … p due to moving its two ends.

    Before the ends were moved, its level differed from the segment's mean by at most what the moved mass contributes;
    in a short segment it lies between the least and the greatest g there.
    """
    dw = places[W, p] - places[W, q]
    moved = places[MASS, q] + places[MASS, p]
    low_q, high_q, low_p, high_p = places[LOW, q], places[HIGH, q], places[LOW, p], places[HIGH, p]
    if dw < 4.0 * moved or not dw > 0.0:
        level_low, level_high = low_p, high_p
        for r in range(q, p):
            level_low = min(level_low, places[LOW, r], places[GAP_LOW, r + 1])
            level_high = max(level_high, places[HIGH, r], places[GAP_HIGH, r + 1])
    else:
        mean = (places[FW, p] - places[FW, q]) / dw
        far_q, far_p = max(high_q - mean, mean - low_q), max(high_p - mean, mean - low_p)
        shift = (places[MASS, q] * far_q + places[MASS, p] * far_p) / (dw - moved)
        level_low, level_high = mean - shift, mean + shift
    far_q, far_p = max(high_q - level_low, level_high - low_q), max(high_p - level_low, level_high - low_p)
    return 2.0 * (places[LOSS, q] * far_q + places[LOSS, p] * far_p)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE, forceinline=True)
def _cost(w: Vector, fw: Vector, f2: Vector, q: int, p: int) -> float:
    """Return the cost of segment q … p with its best level."""
    dw = w[p] - w[q]
    dfw = fw[p] - fw[q]
    return max(0.0, (f2[p] - f2[q]) - dfw * dfw / dw) if dw > 0.0 else 0.0


def penalised(places: Vector, penalty: float) -> tuple[Vector, Indices, int]:
    """Return the least sum of a path from the start to every place, its previous place, and the pairs compared.

    Raises:
        OutOfTime: the time limit is reached.
    """
    n = places.shape[1]
    least_to, origin = np.zeros(n), np.zeros(n, np.int64)
    pairs, p = 0, 1
    while p < n:
        check()
        p, more = uncharged(_penalised_from, places, penalty, least_to, origin, p, _GRAIN)
        pairs += more
    return least_to, origin, pairs


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _penalised_from(
    places: Vector, penalty: float, least_to: Vector, origin: Indices, first: int, grain: int
) -> tuple[int, int]:
    """Fill in `least_to` and `origin` from place `first` on, for at most `grain` steps.

    Returns:
        the place to continue from, and the pairs compared.
    """
    w, fw, f2 = places[W], places[FW], places[F2]
    n = w.size
    sums = np.empty(_BLOCK)
    pairs, steps = 0, 0
    slack = _slack(places)
    skip = penalty >= slack
    for p in range(first, n):
        if pairs + steps > grain:
            return p, pairs
        wp, fwp, f2p = w[p], fw[p], f2[p]
        at = origin[p - 1]  # start where the previous path came from, as this one's origin is likely nearby
        least = least_to[at] + _cost(w, fw, f2, at, p) + penalty - _sides(at, p, places)
        steps += p - at
        end = p
        while end > 0:
            begin = max(0, end - _BLOCK)
            size = end - begin
            # Lower bound of every sum in the block: the sum to its first place plus the cost from its last.
            if not skip or least_to[begin] + _cost(w, fw, f2, end - 1, p) + penalty - 2.0 * slack < least:
                pairs += size
                block = _FAR
                for i in range(size):
                    dw = wp - w[begin + i]
                    dfw = fwp - fw[begin + i]
                    cost = (f2p - f2[begin + i]) - dfw * dfw / dw if dw > 0.0 else 0.0
                    total = least_to[begin + i] + (cost if cost > 0.0 else 0.0)
                    sums[i] = total
                    block = total if total < block else block
                if block + penalty - slack < least:
                    # Try the least first, so that few others remain candidates.
                    nearest = 0
                    while sums[nearest] > block:
                        nearest += 1
                    for j in range(size, -1, -1):
                        i = nearest if j == size else j
                        if sums[i] + penalty - slack < least:
                            total = sums[i] + penalty - _sides(begin + i, p, places)
                            steps += p - begin
                            if total < least:
                                least = total
                                at = begin + i
            pairs += 1
            # Further left, a path saves one λ compared with going through `begin`, plus at most the ends of a segment.
            if least_to[begin] + _cost(w, fw, f2, begin, p) - slack >= least:
                break
            end = begin
        least_to[p] = least
        origin[p] = at
    return n, pairs


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _slack(places: Vector) -> float:
    """Return an upper bound of the cost reduction due to the two ends of any segment."""
    # Loops, because Numba takes a second to compile an array's max() and min().
    loss, high, low = places[LOSS, 0], places[GAP_HIGH, 0], places[GAP_LOW, 0]
    for p in range(1, places.shape[1]):
        loss = max(loss, places[LOSS, p])
        high = max(high, places[GAP_HIGH, p])
        low = min(low, places[GAP_LOW, p])
    return 4.0 * loss * (high - low)


def layered(places: Vector, members: Indices, start: Indices) -> tuple[Vector, float, Indices]:
    """Return the least sum of a path to every member of every layer, that of a path to the end, and that path.

    A sum is `_FAR` if there is no path.

    Args:
        places: the problem.
        members: places that may be the first, second, … boundary, increasing within each layer.
        start: (layers + 1,) where each layer's members begin.

    Raises:
        OutOfTime: the time limit is reached.
    """
    layers = start.size - 1
    last = places.shape[1] - 1
    targets = np.append(members, last)  # the end is the only member of the last layer
    least_to = np.full(targets.size, _FAR)
    origin = np.zeros(targets.size, np.int64)  # the previous member
    for layer in range(layers + 1):
        begin, end = (int(start[layer]), int(start[layer + 1])) if layer < layers else (members.size, members.size + 1)
        first, size = (int(start[layer - 1]), begin - int(start[layer - 1])) if layer > 0 else (0, -1)
        while begin < end:
            check()
            begin = uncharged(_layered_from, places, targets, least_to, origin, begin, end, first, size, _GRAIN)
    path = np.zeros(layers + 2, np.int64)
    path[-1] = last
    at = members.size
    for layer in range(layers, 0, -1):
        at = origin[at]
        path[layer] = members[at]
    return least_to[:-1], float(least_to[-1]), path


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FINITE)
def _layered_from(
    places: Vector,
    members: Indices,
    least_to: Vector,
    origin: Indices,
    begin: int,
    end: int,
    first: int,
    size: int,
    grain: int,
) -> int:
    """Fill in `least_to` and `origin` of the members begin … end − 1, for at most `grain` steps.

    Args:
        places: the problem.
        members, least_to, origin: of all layers.
        begin, end: the members of this layer, from the first one to fill in.
        first, size: start and number of members of the previous layer; −1 before the first layer.
        grain: number of steps.

    Returns:
        the member to continue from.
    """
    w, fw, f2 = places[W], places[FW], places[F2]
    inner = size >= 0
    sums = np.empty(max(size, 1))
    slack = _slack(places)
    steps = 0
    for m in range(begin, end):
        if steps > grain:
            return m
        p = members[m]
        nearest, count = -1, 0
        for i in range(size if inner else 1):
            q = members[first + i] if inner else 0
            if q > p:
                break
            sums[i] = _cost(w, fw, f2, q, p) + (least_to[first + i] if inner else 0.0)
            if nearest < 0 or sums[i] < sums[nearest]:
                nearest = i
            count = i + 1
        steps += count
        least = _FAR
        if nearest >= 0:
            for j in range(count, -1, -1):
                i = nearest if j == count else j
                if sums[i] - slack < least:
                    q = members[first + i] if inner else 0
                    total = sums[i] - _sides(q, p, places)
                    steps += p - q
                    if total < least:
                        least = total
                        origin[m] = first + i
        least_to[m] = least
    return end


@njit(cache=True, nogil=True, error_model="numpy")
def path_to(origin: Indices, end: int) -> Indices:
    """Return the path to `end`, starting at 0."""
    length, p = 1, end
    while p > 0:
        p = origin[p]
        length += 1
    path = np.empty(length, np.int64)
    p = end
    for i in range(length - 1, -1, -1):
        path[i] = p
        p = origin[p]
    return path


def least_penalty(places: Vector) -> float:
    """Return the λ below which segments within a cell would reduce the sum without limit; the programme omits them."""
    within = 4 * places[LOSS] * (places[HIGH] - places[LOW])
    return max(float(within.max()), 1e-18 * float(places[F2, -1]))
