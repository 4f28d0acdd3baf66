"""Numerical detection of the points where a derivative without known kinks is not smooth.

        switched   the points where conditions such as u(x) > 0 change: for an expression, which records its conditions
        jumps      the points where f' itself jumps: for a callable, of which only values are available
        is_step    whether f' is constant between its kinks
        steps      is_step and, where bounds of f' are known, the jumps between grid points that do not show at either
        reach_of   the distance from 0 beyond which f' has settled

All evaluate the points of `grid` and then bisect. A feature between two grid points that shows at neither stays
undetected: `--kinks` is for those. Bisection runs on the integers that order the doubles, so that 64 halvings separate
any two doubles, including those around 0.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .base import Enclosure, Function, Vector, after, before

# A function with infinitely many kinks (abs(sin(x))) gets those nearest to 0.
_MOST = 1000
# Maximum number of cells in which f' may still vary; with more, f' is not a step function.
_MOST_OPEN = 2000
# A smaller jump, relative to f' nearby or to the largest f', may be rounding.
_SMALLEST_NEARBY, _SMALLEST = 1e-8, 1e-10


@cache
def grid() -> Vector:
    """Return the sample points: 0.01 apart up to ±100, then increasingly far apart up to ±10⁹."""
    far = np.geomspace(100, 1e9, 1401)
    near = np.geomspace(1e-12, 0.01, 101)
    return np.unique(np.concatenate([-far, np.linspace(-100, 100, 20001), -near, near, far]))


def switched(conditions: Callable[[Vector], NDArray[np.bool_]]) -> Vector:
    """Return the last doubles before which a condition changes, increasing.

    Args:
        conditions: maps x (n,) to (conditions, n).
    """
    x = grid()
    states = conditions(x)
    which, cell = np.nonzero(states[:, 1:] != states[:, :-1])
    nearest = np.argsort(np.abs(x[cell]), kind="stable")[:_MOST]
    which, cell = which[nearest], cell[nearest]
    was = states[which, cell]

    a, b = _ordinal(x[cell]), _ordinal(x[cell + 1])
    for _ in range(64):
        middle = _between(a, b)
        changed = conditions(_double(middle))[which, np.arange(which.size)] != was
        a, b = np.where(changed, a, middle), np.where(changed, middle, b)
    return np.unique(_double(a))


@np.errstate(invalid="ignore")  # ∞ − ∞ is not a jump
def jumps(derivative: Function) -> Vector:
    """Return the points where f' jumps, each the last double of the piece on its left, increasing."""
    x = grid()
    value = derivative(x)
    size = np.maximum(np.abs(value[1:]), np.abs(value[:-1]))
    step = np.abs(np.diff(value))
    central = np.abs(value[(np.abs(x) <= 10) & np.isfinite(value)])
    smallest = np.maximum(_SMALLEST_NEARBY * size, _SMALLEST * central.max(initial=0))
    cell = np.flatnonzero(np.isfinite(step) & (step > smallest))
    a, b, smallest = _ordinal(x[cell]), _ordinal(x[cell + 1]), smallest[cell]
    at_a, at_b = value[cell], value[cell + 1]
    for _ in range(64):
        middle = _between(a, b)
        at_middle = derivative(_double(middle))
        left = np.abs(at_middle - at_a) >= np.abs(at_b - at_middle)  # the half in which f' moves more
        a, at_a = np.where(left, a, middle), np.where(left, at_a, at_middle)
        b, at_b = np.where(left, middle, b), np.where(left, at_middle, at_b)
        jumping = np.abs(at_b - at_a) > smallest  # false where f' is smooth
        a, b, at_a, at_b, smallest = (row[jumping] for row in (a, b, at_a, at_b, smallest))
    low, high = _double(a), _double(b)
    # Eight neighbouring doubles each, the jump in the middle. Far out doubles are far apart: there a smooth f' changes
    # as much between any two of them.
    around = np.stack([_double(a + i) for i in range(-3, 5)])
    steps = np.abs(np.diff(derivative(around), axis=0))
    smallest = np.maximum(smallest, 8 * np.median(np.delete(steps, 3, axis=0), axis=0))
    # f' may have a separate value at the kink (torch's derivative of |x| at 0): then it jumps on both sides.
    kinks = np.where(steps[4] > smallest, high, low)[steps[3] > smallest]
    return np.unique(kinks[np.argsort(np.abs(kinks), kind="stable")[:_MOST]])


def settled(derivative: Function, kink: float) -> float:
    """Return `kink`, or the double before it if f' takes the value from the right at `kink`."""
    left, at, right = derivative(np.array([before(kink), kink, after(kink)]))
    return before(kink) if abs(at - right) < abs(at - left) else kink


def from_the_left(derivative: Function, kinks: tuple[float, ...]) -> Function:
    """Return f' with its value from the left at `kinks`, regardless of the values of `derivative` there."""
    at = np.asarray(kinks)
    return lambda x: derivative(np.where(np.isin(x, at), np.nextafter(x, -np.inf), x))


def is_step(
    derivative: Function,
    kinks: tuple[float, ...],
    function: Function | None = None,
) -> bool:
    """Return whether f' is constant between `kinks`, to the last bit.

    Args:
        derivative: f'.
        kinks: where it may jump.
        function: f, if f' is its derivative: changes of f between two points reveal features that f' does not show.
    """
    x = np.union1d(grid(), kinks)
    value = derivative(x)
    piece = np.searchsorted(np.asarray(kinks), x, side="left")
    _, first = np.unique(piece, return_index=True)
    if not (value == value[first][piece]).all():
        return False
    if function is None:
        return True
    with np.errstate(all="ignore"):
        start, end = function(np.nextafter(x[:-1], np.inf)), function(x[1:])
        off = np.abs(end - start - value[1:] * np.diff(x))
        room = 1e-11 * (np.abs(start) + np.abs(end) + np.abs(value[1:] * x[1:]))
    return bool((off <= room).all())


def steps(
    derivative: Function, kinks: tuple[float, ...], function: Function | None, enclosure: Enclosure | None
) -> tuple[tuple[float, ...], bool]:
    """Return all kinks of f', and whether it is constant between them; if it is not, the given kinks.

    Args:
        derivative, kinks, function: as for `is_step`.
        enclosure: bounds of f' between two points, if available.
    """
    if not is_step(derivative, kinks, function):
        return kinks, False
    if enclosure is None:
        return kinks, True
    found = _hidden(derivative, kinks, enclosure)
    return (kinks, False) if found is None else (tuple(np.union1d(kinks, found).tolist()), True)


def _hidden(derivative: Function, kinks: tuple[float, ...], enclosure: Enclosure) -> Vector | None:
    """Return the last doubles before jumps of f' that the grid misses, increasing; None if f' is not a step function.

    Args:
        derivative: f', for which `is_step` holds.
        kinks: its known jumps.
        enclosure: bounds of f' between two points.
    """
    x = np.union1d(grid(), kinks)
    low, high = np.nextafter(x[:-1], np.inf), x[1:]
    margin = 1e-12 * np.abs(derivative(x)).max()
    ends = [high]  # of pieces on which f' is constant, to double precision
    while low.size:
        least, most = enclosure(low, high, 0.0)
        restless = ~(most - least <= margin)
        if restless.sum() > _MOST_OPEN:
            return None
        low, high = low[restless], high[restless]
        middle = low + 0.5 * (high - low)
        middle = np.where(middle < high, middle, low)  # of two neighbouring doubles, each is a piece
        divisible = low < high
        low, middle, high = low[divisible], middle[divisible], high[divisible]
        ends.append(middle)
        low, high = np.concatenate([low, np.nextafter(middle, np.inf)]), np.concatenate([middle, high])
    after = np.unique(np.concatenate(ends))
    value = derivative(after)
    found = after[:-1][np.abs(np.diff(value)) > margin]
    return None if found.size > _MOST else found


def reach_of(derivative: Function) -> float:
    """Return the distance at which f' has settled: to its last digit or, if that is beyond 1000, to four digits."""
    x = grid()
    value = derivative(x)
    if not np.isfinite(value).all():
        return math.inf
    size = np.abs(value[np.abs(x) <= 100]).max()
    for tolerance in (2.0**-53, 1e-4):
        restless = np.flatnonzero(np.abs(value - np.where(x < 0, value[0], value[-1])) > tolerance * size)
        reach = max(1.0, np.abs(x[restless]).max(initial=0.0) + 0.01)
        if reach <= 1000:
            return reach
    return math.inf


def _ordinal(x: Vector) -> NDArray[np.int64]:
    """Return integers ordered like the doubles; neighbouring doubles differ by 1."""
    magnitude = np.abs(x).view(np.int64)
    return np.where(x < 0, -magnitude, magnitude)


def _double(ordinal: NDArray[np.int64]) -> Vector:
    return np.copysign(np.abs(ordinal).view(np.float64), ordinal)


def _between(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the midpoints of [a, b], rounded down; a + b may overflow int64."""
    return (a >> 1) + (b >> 1) + (a & b & 1)
