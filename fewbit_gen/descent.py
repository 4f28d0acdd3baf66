"""The descent to a stationary point that all kinds share: Newton's steps, halved until they improve.

    stationary_levels.py   levels of `shared`, each the mean of f' where it applies
    refine.py              boundaries of `interval` and `shared`, each where f' is the midpoint of its levels
    stochastic.py          levels of `stochastic`, each between two segments of equal slope

Each says what a state is, what Newton's step from it would be, and which of two states is better.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
State = TypeVar("State")


def descend(
    state: State,
    steps: int,
    settled: Callable[[State | None, State], bool],
    step: Callable[[State], State | None],
) -> State:
    """Return where at most `steps` steps lead.

    Args:
        state: to begin with.
        steps: their greatest number.
        settled: whether a state, after the one before it (None at first), needs no further step.
        step: the better state after a state; None if there is none.
    """
    before = None
    for _ in range(steps):
        if settled(before, state):
            break
        after = step(state)
        if after is None:
            break
        before, state = state, after
    return state


def halved(start: Vector, step: Vector, halvings: int, better: Callable[[Vector], State | None]) -> State | None:
    """Return the first state that is `better` of start + step, start + step/2, …; None if none is."""
    for halving in range(halvings):
        target = start + step * 0.5**halving
        if np.isfinite(target).all():
            after = better(target)
            if after is not None:
                return after
    return None
