"""A lower bound on the error of every table of kind `stochastic` with K levels.

The levels y_k of the best table lie anywhere between the ends of f'. The line is divided into intervals, each with a
place e in it, and each inner level is moved to the place of its interval. The error V is convex in each level, and at
the best table its derivatives ∂V/∂y_k vanish (or change sign, at a value that f' has over a whole interval). On the way
to the places such a derivative grows by at most

    (y_{k+1} − y_{k−1}) · (mass of values in the interval)     from the level's own way, and
    d · (mass of values between the levels beside it)          from theirs, of length d at most,

so that V grows by at most d times that for each level: its allowance, which decreases with the square of d. Hence

    V  ≥  the least sum of costs − allowances over all paths along K − 2 places,

which the programme of monge.py finds: allowances belong to places, and leave the quadrangle inequality as it is.
(Levels that share a place are fewer segments, which cost λ less each; λ is more than an allowance.) The distance to a
level's neighbours is bounded by what a segment may cost: no more than the known table.

Intervals through which no path stays below the known table's error are left out, the others divided, until the gap is
small enough.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...tables import Table
from ..crossings import near, repeated, sums_by_value
from ..effort import OutOfTime
from ..moments import Moments
from ..monge import F2, FW, W, least_sums, prefix, trial_of

Vector = NDArray[np.float64]

_FIRST = 24  # intervals between two levels of the known table, to begin with
_MOST = 400_000  # intervals
_PASSES = 60
_PARTS = 8  # most parts of an interval in one pass
_SHARE = 0.2  # of the tolerance, that all allowances may take
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class _Line:
    """Intervals, increasing; the first and the last are the two ends of f'.

    Attributes:
        low, high, place: (n,) of each interval; its ends are its place for the first and the last.
        at_low, at_high, at_place: (3, n) integrals of w, gw and g²w of the values of f' up to there.
    """

    low: Vector
    high: Vector
    place: Vector
    at_low: Vector
    at_high: Vector
    at_place: Vector

    @classmethod
    def of(cls, moments: Moments, low: Vector, high: Vector) -> "_Line":
        place = 0.5 * (low + high)
        points, at = np.unique(np.concatenate([low, high, place]), return_inverse=True)
        *_, cells = sums_by_value(moments, points, near(moments))
        sums = prefix(cells)[:, 1:-1][:, at]  # over all x with f'(x) up to each of the points
        return cls(low, high, place, *np.split(sums, 3, axis=1))

    def problem(self, allowance: Vector) -> Vector:
        """Return the sums of monge.py."""
        return np.stack([*self.at_place, self.place, allowance])


def stochastic_bound(moments: Moments, table: Table, K: int, tolerance: float) -> tuple[float, Vector | None]:
    """Return a bound of the error of every table of K levels, and centred levels of a smaller error if it met any.

    Args:
        moments: the problem.
        table: a table with its error; the bound is close only if it is the best one.
        K: number of levels, at least that of the table.
        tolerance: the relative gap to reach.
    """
    error, levels = table.error, table.levels - moments.centre
    scale = float(np.abs(levels).max()) ** 2 * float(moments.prefix[W, -1])
    rounding = 4 * _EPSILON * K * scale
    if K == 2 or error <= rounding:
        return (error if K == 2 else 0.0), None
    inner = np.concatenate([np.linspace(a, b, _FIRST + 1)[:-1] for a, b in pairwise(levels)])
    edges = np.append(inner, levels[-1])
    ends = levels[[0, -1]]
    low, high = _with_ends(edges[:-1], edges[1:], ends)
    bound = 0.0
    with suppress(OutOfTime):
        for _ in range(_PASSES):
            line = _Line.of(moments, low, high)
            allowance = _allowances(line, error + rounding)
            problem = line.problem(allowance)
            trial = trial_of(problem, min(K - 1, line.place.size - 1))
            if trial is None:
                break
            found = line.place[trial.path]
            if found.size <= K and _error(problem[:, trial.path]) < error * (1 - 1e-9) - rounding:
                return bound, found
            sound = trial.penalty > allowance.max()
            if sound:
                bound = max(bound, min(trial.bound - rounding, error))
            if bound >= error * (1 - tolerance):
                break
            through = _through(problem, trial.penalty) - trial.penalty * (K - 1)
            alive = (through <= error + rounding) if sound else np.ones(low.size, dtype=np.bool_)
            alive[[0, -1]] = False
            limit = _SHARE * tolerance * error / K if sound else 0.5 * trial.penalty
            parts = np.clip(np.ceil(np.sqrt(allowance / limit)), 1, _PARTS).astype(np.int64)[alive]
            if parts.sum() > _MOST or (alive.sum() == low.size - 2 and (parts == 1).all()):
                break
            low, high = _with_ends(*_divided(low[alive], high[alive], parts), ends)
    return bound, None


def _with_ends(low: Vector, high: Vector, ends: Vector) -> tuple[Vector, Vector]:
    """Return the intervals with one of no width at either end of f'."""
    return np.concatenate([ends[:1], low, ends[1:]]), np.concatenate([ends[:1], high, ends[1:]])


def _divided(low: Vector, high: Vector, parts: NDArray[np.int64]) -> tuple[Vector, Vector]:
    """Return the intervals, each divided into equal parts."""
    which, nth = repeated(parts)
    width = (high - low) / parts
    begin = low[which] + nth * width[which]
    end = np.where(nth + 1 == parts[which], high[which], low[which] + (nth + 1) * width[which])
    return begin, end


def _cost(a: Vector, b: Vector, sums: Vector) -> Vector:
    """Return the cost of segments from a to b with these sums."""
    return (a + b) * sums[FW] - a * b * sums[W] - sums[F2]


def _error(problem: Vector) -> float:
    """Return the error with the places of a path as levels."""
    places = problem[3]
    return float(np.maximum(_cost(places[:-1], places[1:], np.diff(problem[:3], axis=1)), 0.0).sum())


def _allowances(line: _Line, most: float) -> Vector:
    """Return by how much V may grow when a level of each interval is moved to its place, 0 at the ends."""
    n = line.low.size
    last = _furthest(line, most)
    mirrored = _Line(
        *(-part[::-1] for part in (line.high, line.low, line.place)),
        *(_mirrored(sums, line.at_high[:, -1:]) for sums in (line.at_high, line.at_low, line.at_place)),
    )
    first = n - 1 - _furthest(mirrored, most)[::-1]
    d = 0.5 * (line.high - line.low)
    own = line.at_high[W] - line.at_low[W]
    beside = line.at_high[W][last] - line.at_low[W][first]
    span = line.high[last] - line.low[first]
    # Neighbours move by no more than the widest interval within reach.
    widest = _largest_between(d, first, last)
    return np.where(d > 0, d * (span * own + widest * beside), 0.0)


def _mirrored(sums: Vector, total: Vector) -> Vector:
    """Return the integrals up to −g of the mirrored values, in their order, given those up to g and over all."""
    return (np.asarray([[1.0], [-1.0], [1.0]]) * (total - sums))[:, ::-1]


def _furthest(line: _Line, most: float) -> NDArray[np.int64]:
    """Return the last interval that may hold the next level, for a level in each: a segment costs `most` at most."""
    n = line.low.size
    begin = np.arange(n)
    near, far = np.minimum(begin + 1, n - 1), np.full(n, n)  # the cost is at most `most` at `near`, more at `far`
    for _ in range(int(n).bit_length() + 1):
        middle = (near + far) // 2
        at = np.minimum(middle, n - 1)
        cost = _cost(line.high, line.low[at], line.at_low[:, at] - line.at_high)
        fits = (cost <= most) | (line.low[at] <= line.high)
        near = np.where((middle < n) & (middle > near) & fits, middle, near)
        far = np.where((middle > near) & ~fits, middle, far)
    return near


def _largest_between(values: Vector, first: NDArray[np.int64], last: NDArray[np.int64]) -> Vector:
    """Return the largest of values[first] … values[last], for each pair, from maxima of runs of 2^p values."""
    runs = [values]
    while 2 ** len(runs) <= values.size:
        half = 2 ** (len(runs) - 1)
        runs.append(np.maximum(runs[-1][:-half], runs[-1][half:]))
    length = last - first + 1
    power = np.frexp(length)[1] - 1
    found = np.empty(values.size)
    for p, run in enumerate(runs):
        chosen = power == p
        found[chosen] = np.maximum(run[first[chosen]], run[last[chosen] + 1 - 2**p])
    return found


def _through(problem: Vector, penalty: float) -> Vector:
    """Return the least penalised sum of a path through each place."""
    forward, _ = least_sums(problem, penalty)
    sums = _mirrored(problem[:3], problem[:3, -1:])
    mirrored = np.concatenate([sums, -problem[3:4, ::-1], problem[4:, ::-1]])
    backward, _ = least_sums(np.ascontiguousarray(mirrored), penalty)
    return forward + backward[::-1] + problem[4]
