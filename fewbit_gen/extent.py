"""How far f' varies, wherever the weight lies: for kind `stochastic`, whose levels and boundaries cover all of it.

Within ±`NEAR` the grids of the solver see f'. Beyond, it is followed on cells that widen with their distance, up to
±10⁹ or to where f' overflows (exp(-x) of x/(1+exp(-x)), beyond x = −709). A cell is halved while f' varies in it: by
its bounds, which miss no bump between two points, or for a callable or a named family by its values. An f' that never
settles, like that of sin, is followed within ±`NEAR` and the weight's domain alone.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .activations import Activation

Vector = NDArray[np.float64]

NEAR = 40.0  # e⁻⁴⁰ is less than half a last digit of 1
FURTHEST = 1e9
# Of the range of f': what a cell, or the rest of the line, may vary by. 1/(1 + |x|)² and 1/(1 + x²) are below it at 40.
_SETTLED = 2.0**-10
_CELLS, _MOST = 1400, 60_000  # of a side, before and after halving: sqrt(1 + x²) takes 45,000
# f' grows without limit if at the end it is beyond its values up to a thousandth of the way by more than a tenth of
# their range (x log(1 + x²) by half), and has changed by more than a hundredth since half way (a step has not).
_INNER, _BEYOND, _CHANGED = 1e-3, 0.1, 0.01


@dataclass(frozen=True)
class Side:
    """How far f' varies on one side of 0.

    Attributes:
        end: the distance up to which f' is followed: it varies only where `points` are.
        finite: the distance up to which f' is finite, at least `end`.
        reach: the distance beyond which f' has settled, at most `end`; 0 if it has within `NEAR`.
        points: beyond ±`NEAR`, up to `reach`, increasing distances between which f' hardly varies.
        grows: whether f' still grows at `end`, beyond all of its values within `NEAR`.
    """

    end: float
    finite: float
    reach: float
    points: Vector
    grows: bool


@lru_cache(maxsize=64)
def sides_of(activation: Activation) -> tuple[Side, Side]:
    """Return how far f' varies to the left of 0, and to the right."""
    with np.errstate(all="ignore"):
        inner = activation.derivative(np.linspace(-NEAR, NEAR, 8001))
        inner = inner[np.isfinite(inner)]
        return _side(activation, inner, -1.0), _side(activation, inner, 1.0)


def _side(activation: Activation, inner: Vector, sign: float) -> Side:
    x = np.geomspace(NEAR, FURTHEST, _CELLS + 1)
    g = activation.derivative(sign * x)
    count = int(np.argmin(np.append(np.isfinite(g), False)))
    if count < 2 or not inner.size:
        return Side(NEAR, NEAR, 0.0, np.empty(0), False)
    x, g = x[:count], g[:count]
    end = float(x[-1])
    spread = max(inner.max(), g.max()) - min(inner.min(), g.min())
    earlier = np.append(inner, g[x <= _INNER * end])
    low, high = earlier.min(), earlier.max()
    room, half = _BEYOND * (high - low), activation.derivative(np.array([sign * 0.5 * end]))[0]
    grows = not low - room <= g[-1] <= high + room and abs(g[-1] - half) > _CHANGED * spread
    added = None if grows else _halvings(activation, x, sign, _SETTLED * spread)
    if added is None:
        return Side(NEAR, end, 0.0, np.empty(0), bool(grows))
    points = np.union1d(x, added)
    unsettled = np.flatnonzero(np.abs(activation.derivative(sign * points) - g[-1]) > _SETTLED * spread)
    if not unsettled.size:
        return Side(end, end, 0.0, np.empty(0), False)
    points = points[: unsettled[-1] + 2]
    return Side(end, end, float(points[-1]), points, False)


def _halvings(activation: Activation, x: Vector, sign: float, room: float) -> Vector | None:
    """Return points that divide the cells between `x` until f' varies by at most `room` in each; None if too many."""
    left, right = x[:-1], x[1:]
    added = [np.empty(0)]
    while left.size:
        middle = 0.5 * (left + right)
        if activation.enclosure is None:
            varies = np.ptp(activation.derivative(sign * np.stack([left, middle, right])), axis=0)
        else:
            ends = (np.nextafter(left, right), right) if sign > 0 else (-right, -np.nextafter(left, right))
            least, most = activation.enclosure(*ends, 0.0)
            varies = most - least
        restless = ~(varies <= room) & (left < middle) & (middle < right)
        left, middle, right = left[restless], middle[restless], right[restless]
        added.append(middle)
        if sum(points.size for points in added) > _MOST:
            return None
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
    return np.concatenate(added)
