"""The greedy solution of Prob. (10), and a search that improves it where its gap to the bound matters.

Greedy. Adding a bit to item i at b bits lowers the variance by w_i · g(b), g(b) = 1/(2^b − 1)² − 1/(2^(b+1) − 1)², and
costs D_i bits. From 1 bit each, steps are taken in the order of gain *per bit spent*, skipping those that no longer
fit, until no step fits. (Ordering by gain alone, as the published code does, ends up to 2.07 times above the optimum.)
As g decreases, the steps of an item are in order by themselves, and as the items are ordered by w_i / D_i at every b,
they are sorted once: seven cursors advance through the same list, and the best of the seven is next. This takes the
steps in the order of a binary heap, in O(NL log NL) for the sorting and O(NL) for the rest.

Bound. Let λ be the gain per bit of the first step that does not fit. Allowed to take a fraction of it, the greedy rule
is optimal, so the variance left then is a lower bound. Any allocation lies above the bound by

    Σ_i loss_i(b_i) + λ · (bits not spent),     loss_i(b) = w_i/(2^b − 1)² + λ D_i b − min over b of the same ≥ 0

Search. With many samples the greedy solution lies within 1 % of the bound, and is returned. Else (a few items, of very
different sizes) an item can have b bits in a better solution only if loss_i(b) is below the gap; for most that leaves
one choice. The others are combined one after another, keeping the partial solutions that are neither dominated by
another nor provably above the best, and of those the `WIDTH` most promising: the result is exact if no more remain.
"""

from math import gcd
from typing import Any

import numpy as np
from numba import njit

from ...tables import FewbitError
from .problem import LEAST, LEFT, MOST, Problem

GAP = 0.01  # relative gap to the bound up to which there is no search
WIDTH = 1024  # partial solutions kept
CORE = 48  # items that the search considers


MOST_CELLS = 10**8


def allocate_exactly(sensitivity: Any, elements: Any, budget: float) -> np.ndarray:
    """Return the numbers of bits of least variance, int64 in the shape of the arguments, which are those of `allocate`.

    With u the greatest common divisor of all D, best[i, c] is the least variance of the first i items with c·u bits to
    spend above 1 bit each: O(items · budget / u · 8) steps and items · budget / u bytes of memory.

    Raises:
        FewbitError: as `Problem.of`, or if it would take more than 10^8 bytes.

    Example:
        fewbit.allocation.allocate_exactly([9.0, 1.0], [1000, 1000], 6000)  # array([4, 2])
    """
    problem = Problem.of(sensitivity, elements, budget)
    items = len(problem.w)
    unit = gcd(*problem.D.tolist()) or 1
    cost = problem.D // unit
    spare = int(problem.budget - problem.D.sum()) // unit
    if items * (spare + 1) > MOST_CELLS:
        raise FewbitError(f"{items} items and a budget of {spare} units are too many for the dynamic programme")
    best = np.zeros(spare + 1)
    choices = np.zeros((items, spare + 1), np.int8)
    for i in range(items):
        found = best + problem.w[i] * LEFT[0]
        for b in range(LEAST + 1, MOST + 1):
            more = int(cost[i]) * (b - LEAST)
            if more > spare:
                break
            tried = best[: spare + 1 - more] + problem.w[i] * LEFT[b - LEAST]
            better = tried < found[more:]
            found[more:][better] = tried[better]
            choices[i, more:][better] = b - LEAST
        best = found
    bits = np.empty(items, np.int64)
    left = spare
    for i in reversed(range(items)):
        bits[i] = LEAST + choices[i, left]
        left -= int(cost[i]) * int(choices[i, left])
    return bits.reshape(problem.shape)


def allocate_at_least(
    least: Any, sensitivity: Any, elements: Any, budget: float, variances: np.ndarray = LEFT
) -> np.ndarray:
    """Return the solution of `allocate` with at least `least` bits each: integers of a shape that broadcasts.

    Items that would get fewer bits get `least`, and the others share the rest. If the budget does not allow that,
    `least` is ignored.

    Raises:
        FewbitError: as `allocate`.
    """
    w, D, floor = np.broadcast_arrays(np.asarray(sensitivity, float), elements, least)
    bits = allocate(w, D, budget, variances)
    if (bits >= floor).all() or (D * floor).sum() > budget:
        return bits
    raised = bits < floor
    while True:
        bits = np.where(raised, floor, 0)
        bits[~raised] = allocate(w[~raised], D[~raised], budget - (D * bits).sum(), variances)
        below = bits < floor
        if not below.any():
            return bits
        raised |= below


def allocate(sensitivity: Any, elements: Any, budget: float, variances: np.ndarray = LEFT) -> np.ndarray:
    """Return numbers of bits, 1 to 8, with a small variance: int64 in the shape of the arguments.

    The unspent bits do not suffice for one more step of any item below 8 bits. Items without sensitivity share evenly
    what the others cannot use.

    Args:
        sensitivity: w, each finite and not negative; any shape, such as (L, N).
        elements: D, integers, of a shape that broadcasts with it, such as (L, 1).
        budget: upper bound of Σ D·b.
        variances: at 1 to 8 bits relative to 1 bit, falling by less with every bit; 1/(2^b − 1)² by default.

    Raises:
        FewbitError: a sensitivity is negative or not finite, an element count is not a positive integer, or the budget
            is below Σ D.

    Example:
        fewbit.allocation.allocate([9.0, 1.0], [1000, 1000], 6000)  # array([4, 2])
    """
    problem = Problem.of(sensitivity, elements, budget)
    if not problem.w.size:
        return np.empty(problem.shape, np.int64)
    scale = problem.w.max() or 1.0
    w = problem.w / scale  # against underflow and overflow
    D = problem.D
    order = np.argsort(-(w / D), kind="stable")
    bits = np.full(len(w), LEAST, np.int64)
    λ, before, missing = _fill(w, D, order, problem.budget - int(D.sum()), bits, variances)
    bound = before - λ * missing  # on the variance; λ is 0 if all steps with a gain fit
    value = float((w * variances[bits - LEAST]).sum())
    if λ > 0 and value > bound * (1 + GAP):
        bits = _search(w, D, problem.budget, bits, λ, bound, variances)
        _fill(w, D, order, problem.budget - int((D * bits).sum()), bits, variances)
    return bits.reshape(problem.shape)


@njit(cache=True)
def _fill(w: Any, D: Any, order: Any, spare: Any, bits: Any, variances: Any) -> Any:
    """Take all steps that fit, in the order of gain per bit, in place in `bits`.

    Returns:
        λ; the variance before the first step that did not fit; the bits left at that moment. 0 each if all fit.
    """
    n = len(order)
    gains = variances[:-1] - variances[1:]
    at = np.zeros(len(gains), np.int64)  # position of each cursor in the list
    smallest = D.min()
    λ, before, left_then = 0.0, 0.0, 0
    while λ == 0.0 or spare >= smallest:
        best, reader = -1.0, -1
        for b in range(len(gains)):
            while at[b] < n and bits[order[at[b]]] > b + 1:
                at[b] += 1
            if at[b] < n:
                i = order[at[b]]
                ratio = w[i] * gains[b] / D[i]
                if ratio > best:  # ties go to the fewest bits
                    best, reader = ratio, b
        if reader < 0:
            break
        i = order[at[reader]]
        at[reader] += 1
        if bits[i] != reader + 1:  # an earlier step of it did not fit
            continue
        if D[i] <= spare:
            bits[i] += 1
            spare -= D[i]
        elif λ == 0.0 and best > 0.0:
            λ, left_then = best, spare
            for j in range(n):
                before += w[j] * variances[bits[j] - 1]
    return λ, before, left_then


def _search(
    w: np.ndarray, D: np.ndarray, budget: int, bits: np.ndarray, λ: float, bound: float, variances: np.ndarray
) -> np.ndarray:
    """Return bits at least as good as `bits`."""
    levels = np.arange(LEAST, MOST + 1)
    loss = w[:, None] * variances + λ * D[:, None] * levels
    loss -= loss.min(1, keepdims=True)
    best = float((w * variances[bits - LEAST]).sum()) - bound
    base = loss.argmin(1) + LEAST
    open_ = np.flatnonzero((loss < best).sum(1) > 1)
    # The items whose second choice costs least, largest first: the small ones then use up the rest.
    open_ = open_[np.argsort(np.partition(loss[open_], 1, axis=1)[:, 1], kind="stable")][:CORE]
    open_ = open_[np.argsort(-D[open_], kind="stable")]
    spare, lost = np.array([budget - int((D * base).sum())]), np.zeros(1)
    history: list[tuple[np.ndarray, np.ndarray]] = []
    up = np.concatenate([np.cumsum((D[open_] * (MOST - base[open_]))[::-1])[::-1], [0]])
    down = np.concatenate([np.cumsum((D[open_] * (base[open_] - LEAST))[::-1])[::-1], [0]])
    for k, i in enumerate(open_):
        allowed = levels[loss[i] < best]
        parent = np.repeat(np.arange(len(lost)), len(allowed))
        chosen = np.tile(allowed, len(lost))
        new_spare = spare[parent] - D[i] * (chosen - base[i])
        new_lost = lost[parent] + loss[i, chosen - LEAST]
        least = new_lost + λ * np.maximum(new_spare - up[k + 1], 0)
        kept = np.flatnonzero((least < best) & (new_spare >= -down[k + 1]))
        value = new_lost + λ * new_spare  # the variance up to a constant
        kept = kept[np.lexsort((value[kept], -new_spare[kept]))]  # the cheapest first
        kept = kept[value[kept] < np.concatenate([[np.inf], np.minimum.accumulate(value[kept])[:-1]])]
        if len(kept) > WIDTH:
            promise = new_lost[kept] + λ * np.abs(new_spare[kept])
            kept = np.sort(kept[np.argpartition(promise, WIDTH)[:WIDTH]])
        if not len(kept):
            return bits  # nothing better
        spare, lost = new_spare[kept], new_lost[kept]
        history.append((parent[kept], chosen[kept]))
    above = np.where(spare >= 0, lost + λ * spare, np.inf)
    at = int(above.argmin()) if len(above) else 0
    if not above[at] < best:
        return bits
    found = base.copy()
    for i, (parent, chosen) in zip(open_[::-1], reversed(history), strict=True):
        found[i] = chosen[at]
        at = parent[at]
    return found
