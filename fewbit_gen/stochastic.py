"""Kind `stochastic`: the levels whose random rounding has the least variance, and no bias.

    a value g of f' between neighbouring levels y⁻ < y⁺ becomes y⁺ with probability (g − y⁻)/(y⁺ − y⁻), else y⁻:
    E[q] = g,     E[(q − g)²] = (y⁺ − g)(g − y⁻)

The least and the greatest level are the ends of f' over *all* x, wherever the weight lies: what is beyond them
could not be represented without bias. So the error is a sum over the K − 1 segments between levels, each of the cost

    ∫ (b − g)(g − a) w = (a + b) ∫ g w − ab ∫ w − ∫ g² w,

and the levels cut the line of the values of f' (monge.py): exact over a grid of values. It is refined on the exact
moments: at the optimum

    ∫ (g − y_{k−1}) w from y_{k−1} to y_k    =    ∫ (y_{k+1} − g) w from y_k to y_{k+1},

or y_k lies on a value that f' has over a whole interval (SELU's λ), where the left side jumps past the right one. Two
levels enter each equation beside its own: Newton's method with a tridiagonal Jacobian.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_banded

from ..tables.errors import FewbitError
from .activations import Activation
from .crossings import near, sums_by_value
from .descent import descend, halved
from .extent import NEAR, sides_of
from .moments import SHARED_CELLS, Moments
from .monge import F2, FW, W, best_cuts, prefix
from .weights import Weight

Vector = NDArray[np.float64]

_ROUNDS, _STEPS, _HALVINGS = 4, 60, 6
_NO_LESS = 1e-14  # what a Newton step would take from the error, relative to it
_ENOUGH = 1e-13  # a Newton step, relative to the range of f'
_PINNED = 1e-9  # a level that its equation changes sign about, relative to the range of f', lies on a flat value
_FAR = (1e3, 1e5, 1e7)  # where the values of a settled f' are taken
# A weight with fewer cells of the grid in its own domain (normal:0,1e-4 has half a one) gets as many as the second.
_FEWEST_CELLS, _OWN_CELLS = 256, 4096
_CANDIDATES = 32  # least levels to choose from, for each level


def range_of(activation: Activation, moments: Moments) -> tuple[float, float]:
    """Return the least and the greatest f' over all x, centred, from the moments of `everywhere`."""
    (left, right), g = moments.cell_ends, moments.at_cell_ends
    ends = []
    for sign in (-1.0, 1.0):
        cell = int(np.unravel_index(np.argmax(sign * g), g.shape)[1])
        near = slice(max(cell - 1, 0), cell + 2)
        low, high = left[near], right[near]
        for _ in range(60):  # f' has one extremum in a cell at most: by thirds
            first, second = low + (high - low) / 3, high - (high - low) / 3
            rises = sign * moments.centred(second) > sign * moments.centred(first)
            low, high = np.where(rises, first, low), np.where(rises, high, second)
        ends.append(float(sign * max(sign * g.flat[np.argmax(sign * g)], (sign * moments.centred(high)).max())))
    left, right = sides_of(activation)
    far = [sign * min(x, side.finite) for x in _FAR for sign, side in ((-1.0, left), (1.0, right))]
    with np.errstate(all="ignore"):
        values = activation.derivative(np.asarray(far)) - moments.centre
    values = values[np.isfinite(values)]
    return min(ends[0], float(values.min(initial=ends[0]))), max(ends[1], float(values.max(initial=ends[1])))


def is_bounded(activation: Activation) -> bool:
    """Return whether f' does not grow any more far out."""
    return not any(side.grows for side in sides_of(activation))


def covered(activation: Activation, weight: Weight) -> tuple[float, float]:
    """Return the interval of x on which levels and boundaries cover f': all of it if f' settles, see extent.py."""
    left, right = sides_of(activation)
    return min(weight.domain[0], -left.end), max(weight.domain[1], right.end)


def everywhere(activation: Activation, weight: Weight) -> Weight:
    """Return `weight` with a domain that reaches as far as f' varies; beyond the weight's own it is 0.

    Raises:
        FewbitError: f' has no bounds, so that no levels are without bias.
    """
    low, high = weight.domain
    left, right = sides_of(activation)
    if left.grows or right.grows:
        raise FewbitError(
            f"the derivative of {activation.name} grows without limit: levels that cover all its values, as kind "
            "stochastic needs, do not exist"
        )
    reach = min(activation.reach, NEAR)
    wide = min(low, -max(reach, left.reach)), max(high, max(reach, right.reach))
    if wide == weight.domain:
        return weight

    def density(x: Vector) -> Vector:
        inside = (x >= low) & (x <= high)
        return np.where(inside, weight.density(np.clip(x, low, high)), 0.0)

    breaks = [low, *weight.breakpoints, high, *(-left.points[-left.points < low]), *right.points[right.points > high]]
    if (high - low) * SHARED_CELLS < _FEWEST_CELLS * (wide[1] - wide[0]):
        breaks += np.linspace(low, high, _OWN_CELLS + 1)[1:-1].tolist()
    inner = tuple(float(x) for x in sorted(set(breaks)) if wide[0] < x < wide[1])
    return replace(weight, domain=wide, density=density, breakpoints=inner)


def solve_stochastic(moments: Moments, ends: tuple[float, float], K: int) -> Vector:
    """Return at most K levels, centred and increasing, from the least to the greatest f'.

    Exact over the mean values of the grid's cells, of which the inner levels are chosen.

    Args:
        moments: the problem.
        ends: the least and the greatest f', centred.
        K: number of levels.
    """
    w, fw = moments.cells[0], moments.cells[1]
    holds = w > 0
    values, at = np.unique(np.clip(fw[holds] / w[holds], *ends), return_inverse=True)
    mass = np.bincount(at, weights=w[holds]).astype(np.float64)
    # Beside the values of f', which lie far apart where it is steep, levels between them.
    places = np.union1d(values, np.linspace(*ends, _CANDIDATES * K + 1))
    up_to = np.searchsorted(values, places, side="right")
    sums = prefix(np.stack([mass, values * mass, values * values * mass]))[:, up_to]
    problem = np.stack([*sums, places, np.zeros(places.size)])
    # (where every division costs nothing, cuts may coincide)
    return places[np.unique(best_cuts(problem, min(K - 1, places.size - 1)))]


@dataclass(frozen=True)
class Segments:
    """The segments between levels.

    Attributes:
        levels: (K,) increasing, centred; the first and the last are the ends of f'.
        sums: (3, K − 1) moments of each segment.
        cuts, codes: (m − 1,) and (m,): where f' crosses an inner level, and the segment of each piece.
    """

    levels: Vector
    sums: Vector
    cuts: Vector
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, moments: Moments, levels: Vector, tolerance: float = 0.0) -> "Segments":
        """Measure the segments between `levels`, with cuts that are at most `tolerance` before the last double."""
        cuts, codes, sums = sums_by_value(moments, levels[1:-1], tolerance)
        return cls(levels, sums, cuts, codes)

    @property
    def error(self) -> float:
        """The variance."""
        a, b = self.levels[:-1], self.levels[1:]
        return float(((a + b) * self.sums[FW] - a * b * self.sums[W] - self.sums[F2]).sum())

    @property
    def residual(self) -> Vector:
        """(K − 2,) the left side of each equation less its right side."""
        y, (w, fw, _) = self.levels, self.sums
        return (fw - y[:-1] * w)[:-1] - (y[1:] * w - fw)[1:]


def refined_levels(moments: Moments, levels: Vector) -> Vector:
    """Return stationary levels near `levels`, with an error that is no larger, up to rounding."""
    state = _near(moments, levels)
    if levels.size < 3:
        return levels
    about, enough = _PINNED * float(levels[-1] - levels[0]), _ENOUGH * float(levels[-1] - levels[0])

    def settled(before: Segments | None, state: Segments) -> bool:
        return before is not None and bool(np.abs(state.levels - before.levels).max() <= enough)

    pinned = None
    for _ in range(_ROUNDS):
        before, pinned = pinned, _pinned(moments, state.levels, about)
        if before is not None and (pinned == before).all():
            break
        state = descend(state, _STEPS, settled, partial(_newton, moments, free=~pinned))
    return state.levels


def _near(moments: Moments, levels: Vector) -> Segments:
    """Return the segments, with cuts so near to the true ones that what lies between changes no sum but by rounding."""
    return Segments.of(moments, levels, near(moments))


def _pinned(moments: Moments, levels: Vector, about: float) -> NDArray[np.bool_]:
    """Return (K − 2,): which inner levels have a mass of values of f' about them that keeps them there."""
    sides = []
    for shift in (-about, about):
        y = levels.copy()
        y[1:-1] += shift
        at = _near(moments, y if (np.diff(y) > 0).all() else levels)
        sides.append(replace(at, levels=levels).residual)
    return (sides[0] <= 0) & (sides[1] >= 0)


def _newton(moments: Moments, state: Segments, free: NDArray[np.bool_]) -> Segments | None:
    """Return the state after a step of the free levels, halved until the error decreases; None if it never does."""
    y, K = state.levels, state.levels.size
    h = moments.step(state.cuts)
    slope = np.abs(moments.centred(state.cuts + h) - moments.centred(state.cuts - h)) / (2 * h)
    passed = np.minimum(state.codes[1:], state.codes[:-1])
    smooth = (np.abs(np.diff(state.codes)) == 1) & (slope > 0)
    flow = np.where(smooth, moments.weight.density(state.cuts) / np.where(slope > 0, slope, 1), 0.0)
    density = np.bincount(passed, weights=flow, minlength=K - 2)[: K - 2]
    w = state.sums[W]
    diagonal = (y[2:] - y[:-2]) * density
    # Where values of f' lie on one side alone, or nowhere near, the level is moved towards the mean of the two sides.
    least = 0.05 * (w[:-1] + w[1:])
    bands = np.zeros((3, K - 2))
    bands[0, 1:], bands[1], bands[2, :-1] = -w[1:-1], np.maximum(diagonal, least), -w[1:-1]
    for row, shift in ((0, 1), (2, -1)):  # a level that stays has no part in the equations of others
        bands[row] = np.where(np.roll(free, shift) & free, bands[row], 0.0)
    residual = np.where(free, state.residual, 0.0)
    bands[1] = np.where(free & (bands[1] > 0), bands[1], 1.0)
    alone = np.zeros_like(bands)
    alone[1] = bands[1] + np.abs(bands[0]) + np.abs(bands[2])

    def better(target: Vector) -> Segments | None:
        if not (np.diff(target) > 0).all():
            return None
        after, rounding = _near(moments, target), moments.rounding
        nearer = np.abs(after.residual[free]).max(initial=0) < np.abs(residual).max(initial=0)
        improves = after.error < state.error - rounding or (nearer and after.error <= state.error + rounding)
        return after if improves else None

    for system in (bands, alone):
        try:
            step = -solve_banded((1, 1), system, residual)
        except np.linalg.LinAlgError:
            continue
        if abs(float(step @ residual)) <= _NO_LESS * state.error:
            return None
        moves = np.concatenate([[0.0], step, [0.0]])
        after = halved(y, moves, _HALVINGS, better)
        if after is not None:
            return after
    return None
