"""The λ that leads to K segments: least paths of K segments without a layer for each.

Let a path pay λ for each of its segments, however many. The least sum, less λK, is at most the least sum of exactly K
segments, whatever λ; it *is* that sum if the path that attains it has K. The fewer segments the greater λ, so the λ
to take is soon found between one that leads to more and one that leads to fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .effort import OutOfTime

_TRIALS, _MORE_TRIALS = 60, 15  # of λ without, and with one to begin with
_NARROW = 0.1  # a bracket of λ, in parts of λ/K: where one leads to K segments, about 3 such parts do

# From λ to the least penalised sum and, from 0 on, the places that its path goes by.
Programme = Callable[[float], tuple[float, NDArray[np.int64]]]


@dataclass(frozen=True)
class Trial:
    """What one λ gives.

    Attributes:
        penalty: λ.
        bound: the least penalised sum less λK.
        path: places that its path goes by, the two ends of the line included: segments + 1 of them.
        missed: whether the search ended in a bracket too narrow for a λ that leads to K segments.
    """

    penalty: float
    bound: float
    path: NDArray[np.int64]
    missed: bool = False


def best_penalty(
    programme: Programme,
    K: int,
    between: tuple[float, float],
    penalty: float | None = None,
    enough: float = np.inf,
) -> Trial:
    """Return the λ of some with the greatest bound: it is concave in λ, with slope segments − K.

    Args:
        programme: what finds the least path for a λ.
        K: segments.
        between: the least and the greatest λ to try.
        penalty: a λ to begin with; where None, all are searched.
        enough: a bound at which the search stops.

    Raises:
        OutOfTime: before there is any trial; later, the best so far is returned.
    """
    low, high = between
    guess, step = (max(low, penalty), 1 + 2 / K) if penalty else (float(np.sqrt(low * high)), 16.0)
    trials: list[Trial] = []
    too_low = too_high = None
    for _ in range(_MORE_TRIALS if penalty else _TRIALS):
        try:
            least, path = programme(guess)
        except OutOfTime:
            if not trials:
                raise
            break
        trials.append(Trial(guess, least - guess * K, path))
        segments = trials[-1].path.size - 1
        if segments == K or trials[-1].bound >= enough:
            break
        too_low, too_high = (guess, too_high) if segments > K else (too_low, guess)
        if too_low and too_high:
            guess = float(np.sqrt(too_low * too_high))
            if too_high < too_low * (1 + _NARROW / K):
                return replace(max(trials, key=lambda trial: trial.bound), missed=True)
        else:
            guess = min(high, guess * step) if too_low else max(low, guess / step)
            step *= 1.5
        if guess in [trial.penalty for trial in trials]:
            break
    return max(trials, key=lambda trial: trial.bound)
