"""The exact solution of Prob. (10), by dynamic programming over the budget: the reference for the greedy rule."""

from math import gcd
from typing import Any

import numpy as np

from ...tables import FewbitError
from .problem import LEAST, LEFT, MOST, Problem

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
