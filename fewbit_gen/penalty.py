"""The λ that yields K segments: least paths of K segments without a layer for each.

Let each segment of a path cost an extra λ, for any number of segments. The least sum minus λK is at most the least sum
of exactly K segments, for any λ; it *equals* that sum if the path that attains it has K. The number of segments
decreases with λ, so a search between a λ that yields more and one that yields fewer finds it quickly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .effort import OutOfTime

_TRIALS, _MORE_TRIALS = 60, 15  # values of λ without and with an initial one
_NARROW = 0.1  # width of a bracket of λ, relative to λ/K: the λ that yield K segments span about 3 such units

# Maps λ to the least penalised sum and the places of its path, starting at 0.
Programme = Callable[[float], tuple[float, NDArray[np.int64]]]


@dataclass(frozen=True)
class Trial:
    """The result for one λ.

    Attributes:
        penalty: λ.
        bound: the least penalised sum minus λK.
        path: places of its path, including the two ends of the line: segments + 1 of them.
        missed: whether the search ended in a bracket too narrow to contain a λ that yields K segments.
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
    """Return the tried λ with the greatest bound, which is concave in λ, with slope segments − K.

    Args:
        programme: finds the least path for a λ.
        K: number of segments.
        between: the least and the greatest λ to try.
        penalty: the first λ to try; None searches the whole range.
        enough: a bound at which the search stops.

    Raises:
        OutOfTime: the time limit is reached before the first trial; later, the best trial so far is returned.
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


def greatest_bound(programme: Programme, K: int, near: Trial) -> Trial:
    """Return the λ with the greatest bound of all, where costs tie and no λ yields K segments.

    The bound is concave in λ and consists of straight lines, of slope segments − K. So it is greatest where a line that
    rises meets one that falls.

    Args:
        programme: finds the least path for a λ.
        K: number of segments.
        near: a trial close to it.
    """
    rising = falling = None
    for step in range(_MORE_TRIALS):
        factor = 1 + 2.0**step * _NARROW / K
        for penalty in (near.penalty / factor, near.penalty * factor):
            trial = _tried(programme, K, penalty)
            slope = trial.path.size - 1 - K
            near = max(near, trial, key=lambda one: one.bound)
            rising, falling = (trial if slope > 0 else rising), (trial if slope < 0 else falling)
        if rising and falling:
            break
    while rising and falling:
        up, down = rising.path.size - 1 - K, falling.path.size - 1 - K
        penalty = (falling.bound - rising.bound + up * rising.penalty - down * falling.penalty) / (up - down)
        if not rising.penalty < penalty < falling.penalty:
            break
        met = rising.bound + up * (penalty - rising.penalty)
        trial = _tried(programme, K, penalty)
        near = max(near, trial, key=lambda one: one.bound)
        slope = trial.path.size - 1 - K
        if slope == 0 or trial.bound >= met - 1e-15 * abs(met):
            break
        rising, falling = (trial, falling) if slope > 0 else (rising, trial)
    return near


def _tried(programme: Programme, K: int, penalty: float) -> Trial:
    least, path = programme(penalty)
    return Trial(penalty, least - penalty * K, path)
