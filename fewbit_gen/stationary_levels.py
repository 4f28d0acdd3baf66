"""Stationary levels of a `shared` table, near the solver's grid solution.

The best table takes at every x the level nearest to f'(x), and each level is the weighted mean of f' where it applies:

    y_k = M_k(y),    M_k the mean of g between the thresholds (y_{k−1} + y_k)/2 and (y_k + y_{k+1})/2.

Lloyd's method iterates y ← M(y), which never increases the error but slows down. Newton's method converges in a few
steps: only the two thresholds of a level move its mean, so its Jacobian is tridiagonal, with the density of g at a
threshold summed over all x where f' crosses it.
"""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_banded

from .crossings import nearest_level_table
from .descent import descend, halved
from .effort import OutOfTime
from .moments import Moments

Vector = NDArray[np.float64]

_STEPS = 100  # of Newton
_HALVINGS = 4  # of a step that does not bring the levels nearer
_ENOUGH = 1e-13  # |y − M(y)|, in units of f'


@dataclass(frozen=True)
class _State:
    """Levels, their boundaries and their error.

    Attributes:
        levels: (K,) increasing.
        boundaries, codes: (m − 1,) and (m,) of the nearest-level table.
        mass, means: (K,) mass of each level's intervals, and mean of g over them.
        error: with the means as levels.
    """

    levels: Vector
    boundaries: Vector
    codes: NDArray[np.int64]
    mass: Vector
    means: Vector
    error: float

    @property
    def residual(self) -> float:
        """The largest |y − M(y)|."""
        return float(np.abs(self.levels - self.means).max())


def stationary_levels(
    moments: Moments, boundaries: Vector, codes: NDArray[np.int64]
) -> tuple[Vector, NDArray[np.int64]]:
    """Return boundaries and codes of a table that is stationary, up to rounding and the time limit.

    Args:
        moments: the problem.
        boundaries: (m − 1,) of the initial table; the result's error is no larger.
        codes: (m,) 0 … K − 1, each used, increasing with f'. The result omits a code whose level is never nearest.
    """
    state = None

    def step(before: _State) -> _State | None:
        nonlocal state  # the last one, should time run out within a step
        after = _newton(moments, before) or _evaluate(moments, before.means)
        if not _improves(moments, after, before):
            return None
        state = after
        return after

    with suppress(OutOfTime):
        state = _evaluate(moments, _means(moments, boundaries, codes)[1])
        descend(state, _STEPS, lambda _, at: at.residual <= _ENOUGH, step)
    return (boundaries, codes) if state is None else (state.boundaries, state.codes)


def _evaluate(moments: Moments, levels: Vector) -> _State:
    boundaries, codes = nearest_level_table(moments, levels)
    used, codes = np.unique(codes, return_inverse=True)
    levels = levels[used]
    mass, means, error = _means(moments, boundaries, codes)
    means = np.where(mass > 0, means, levels)
    return _State(levels, boundaries, codes, mass, means, error)


def _means(moments: Moments, boundaries: Vector, codes: NDArray[np.int64]) -> tuple[Vector, Vector, float]:
    """Return the mass of every code, its mean of g (0 without mass), and the error with the means as levels."""
    low, high = moments.edges[[0, -1]]
    per_interval = moments.between(np.concatenate([[low], boundaries, [high]]))
    w, fw, f2 = (np.bincount(codes, weights=row).astype(np.float64) for row in per_interval)
    means = np.where(w > 0, fw / np.where(w > 0, w, 1), 0.0)
    return w, means, float((f2 - fw * means).sum())


def _newton(moments: Moments, state: _State) -> _State | None:
    """Return the state after a Newton step, halved until it decreases; None if it never does."""
    y, K = state.levels, state.levels.size
    threshold = 0.5 * (y[1:] + y[:-1])
    s = state.boundaries
    # The slope of f' affects only the step, never a result, so a central difference suffices.
    h = moments.step(s)
    slope = np.abs(moments.centred(s + h) - moments.centred(s - h)) / (2 * h)
    smooth = np.abs(moments.centred(s) - threshold[np.minimum(state.codes[1:], state.codes[:-1])]) < 1e-6
    flow = np.where(smooth & (slope > 0), moments.weight.density(s) / np.where(slope > 0, slope, 1), 0.0)
    passed = np.minimum(state.codes[1:], state.codes[:-1])  # the threshold; none if a jump crosses several
    density = np.bincount(passed, weights=flow, minlength=K - 1)[: K - 1]
    per_mass = np.where(state.mass > 0, 1 / np.where(state.mass > 0, state.mass, 1), 0.0)
    up = np.append(0.5 * density * (threshold - state.means[:-1]) * per_mass[:-1], 0.0)  # ∂M_k/∂y_{k+1}, half of ∂M/∂t
    down = np.append(0.0, 0.5 * density * (state.means[1:] - threshold) * per_mass[1:])
    bands = np.zeros((3, K))
    bands[0, 1:], bands[1], bands[2, :-1] = -up[:-1], 1 - up - down, -down[1:]
    try:
        step = solve_banded((1, 1), bands, state.means - y)
    except np.linalg.LinAlgError:
        return None

    def better(target: Vector) -> _State | None:
        if not (np.diff(target) > 0).all():
            return None
        after = _evaluate(moments, target)
        return after if after.levels.size == K and _improves(moments, after, state) else None

    return halved(y, step, _HALVINGS, better)


def _improves(moments: Moments, after: _State, state: _State) -> bool:
    """Return whether a step is an improvement: in error or, once that is within rounding, in residual."""
    if abs(after.error - state.error) > moments.rounding:
        return after.error < state.error
    return after.residual < state.residual
