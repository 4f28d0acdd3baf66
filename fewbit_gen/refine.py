"""Refinement of the grid solution to a stationary point of the continuous problem (paper, Section 3: "finetuned").

With every level at the weighted mean of f' over its intervals, the error depends on the boundaries alone, and

    ∂L/∂s_i = 2 w(s_i) (y_right − y_left) (f'(s_i) − (y_left + y_right) / 2)

so a boundary is stationary where f' equals the midpoint of its two levels, or at a jump of f' across that
midpoint. Newton's method on these residuals, with the levels' dependence on the boundaries in the Jacobian,
converges in a few steps from the dynamic programme's solution. A step that overshoots is halved; if no step
decreases the error, each boundary moves alone to its own optimum, which always does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array
from scipy.sparse.linalg import splu

from .descent import descend, halved
from .effort import over
from .moments import Moments

Vector = NDArray[np.float64]
Codes = NDArray[np.int64]

_STEPS = 50  # of Newton
_HALVINGS = 8  # of a step that does not improve the table
_ENOUGH = 1e-13  # residual, in units of f'
_DENSE = 512  # up to this many boundaries Newton's system is solved as a dense matrix, in cubic time


@dataclass(frozen=True)
class Refined:
    """A stationary table over the weight's domain.

    Attributes:
        boundaries: (m − 1,).
        levels: (K,) weighted means, not centred.
        residual: the largest |f'(s_i) − (y_left + y_right)/2| over the boundaries that are not at a kink.
    """

    boundaries: Vector
    levels: Vector
    residual: float


@dataclass(frozen=True)
class _State:
    boundaries: Vector
    levels: Vector  # (K,) centred
    mass: Vector  # (K,)
    error: float


def refine(moments: Moments, boundaries: Vector, codes: Codes) -> Refined:
    """Move `boundaries` to a stationary point; the result is at least as good as the start.

    Args:
        moments: the problem.
        boundaries: (m − 1,) strictly increasing, inside the weight's domain.
        codes: (m,) the level of each interval: 0 … K − 1, each used.
    """

    def settled(_: _State | None, state: _State) -> bool:
        residual, free = _residual(moments, state, codes)
        return over() or not free.any() or bool(np.abs(residual[free]).max() <= _ENOUGH)

    def step(state: _State) -> _State | None:
        residual, free = _residual(moments, state, codes)
        after = _newton(moments, state, codes, residual, free)
        if after is not None:
            return after
        alone = _each_alone(moments, state, codes, free)
        if np.any(np.diff(alone) <= 0):  # an interval has shrunk to nothing: the table has one too many
            return None
        after = _evaluate(moments, alone, codes)
        return after if after.error < state.error else None

    state = descend(_evaluate(moments, boundaries, codes), _STEPS, settled, step)
    residual, free = _residual(moments, state, codes)
    largest = float(np.abs(residual[free]).max()) if free.any() else 0.0
    return Refined(state.boundaries, state.levels + moments.centre, largest)


def _evaluate(moments: Moments, boundaries: Vector, codes: Codes) -> _State:
    low, high = moments.edges[[0, -1]]
    per_interval = moments.between(np.concatenate([[low], boundaries, [high]]))
    K = int(codes.max()) + 1
    w, fw, f2 = (np.bincount(codes, weights=row, minlength=K) for row in per_interval)
    means = np.where(w > 0, fw / np.where(w > 0, w, 1), 0.0)
    # Where there is next to no mass, moments and their ratio are rounding: f' may never be near it.
    levels = np.clip(means, -2 * moments.spread, 2 * moments.spread)
    errors = np.where(levels == means, f2 - fw * means, f2 - 2 * fw * levels + w * levels**2)
    return _State(boundaries, levels, np.asarray(w, float), float(errors.sum()))


def _residual(moments: Moments, state: _State, codes: Codes) -> tuple[Vector, NDArray[np.bool_]]:
    """Return f'(s_i) − (y_left + y_right)/2 and which boundaries are free: not fixed by a jump across it."""
    y = state.levels[codes]
    middle = 0.5 * (y[1:] + y[:-1])
    g = moments.centred(np.stack([state.boundaries, np.nextafter(state.boundaries, np.inf)]))
    at_kink = np.isin(state.boundaries, np.asarray(moments.activation.kinks))
    before, after = g[0], np.where(at_kink, g[1], g[0])  # they differ where f' jumps
    held = (before != after) & ((before - middle) * (after - middle) <= 0)
    # Beside a jump that does not fix it, a boundary uses the side towards which the error decreases.
    side = np.where(np.abs(before - middle) < np.abs(after - middle), before, after)
    return side - middle, ~held


def _newton(moments: Moments, state: _State, codes: Codes, residual: Vector, free: NDArray[np.bool_]) -> _State | None:
    """Return the state after a Newton step of the free boundaries, halved until it decreases; None if it never does."""
    s = state.boundaries
    # The slope of f' affects only the step, never a result, so a central difference suffices.
    h = moments.step(s)
    slope = (moments.centred(s + h) - moments.centred(s - h)) / (2 * h)
    left, right = codes[:-1], codes[1:]
    flow = moments.weight.density(s)
    holds = state.mass > 0
    per_mass = np.where(holds, 1 / np.where(holds, state.mass, 1), 0)
    g = residual + 0.5 * (state.levels[left] + state.levels[right])
    lifts = flow * (g - state.levels[left]) * per_mass[left]  # ∂y_left/∂s
    lowers = -flow * (g - state.levels[right]) * per_mass[right]
    chosen = np.flatnonzero(free)
    step = _newton_step(slope[chosen], left[chosen], right[chosen], lifts[chosen], lowers[chosen], -residual[chosen])
    if step is None:
        return None

    def better(target: Vector) -> _State | None:
        low, high = moments.edges[[0, -1]]
        fence = np.concatenate([[low], target, [high]])
        ordered = bool((fence[1:] > fence[:-1]).all())  # false if one is NaN
        if not ordered or any(((s - k) * (target - k) < 0).any() for k in moments.activation.kinks):
            return None
        after = _evaluate(moments, target, codes)
        return after if _improves(moments, after, residual, free, state, codes) else None

    moves = np.zeros_like(s)
    moves[chosen] = step
    return halved(s, moves, _HALVINGS, better)


def _newton_step(
    slope: Vector, left: Codes, right: Codes, lifts: Vector, lowers: Vector, residual: Vector
) -> Vector | None:
    """Return the steps ds of the boundaries that cancel `residual`; None if there is no solution.

    slope · ds − (dy_left + dy_right)/2 = residual, where the levels change by dy: by lifts · ds of the boundaries
    where they end, and by lowers · ds of those where they begin.
    """
    m, K = slope.size, int(max(left.max(), right.max())) + 1
    index = np.arange(m)
    try:
        if m <= _DENSE:
            moved = np.zeros((K, m))  # ∂y_c/∂s_j
            np.add.at(moved, (left, index), lifts)
            np.add.at(moved, (right, index), lowers)
            steps = np.linalg.solve(np.diag(slope) - 0.5 * (moved[left] + moved[right]), residual)
            return np.asarray(steps, np.float64)
        # With dy as unknowns too, the system has few entries per row.
        half, level = np.full(m, -0.5), m + np.arange(K)
        rows = np.concatenate([index, index, index, m + left, m + right, level])
        columns = np.concatenate([index, m + left, m + right, index, index, level])
        entries = np.concatenate([slope, half, half, -lifts, -lowers, np.ones(K)])
        system = csc_array((entries, (rows, columns)), shape=(m + K, m + K))
        return np.asarray(splu(system).solve(np.append(residual, np.zeros(K)))[:m], np.float64)
    except (np.linalg.LinAlgError, RuntimeError):  # singular: NumPy's exception, and SciPy's
        return None


def _improves(
    moments: Moments, step: _State, residual: Vector, free: NDArray[np.bool_], state: _State, codes: Codes
) -> bool:
    """Return whether a step is an improvement: in error or, once that is within rounding, in residual."""
    if step.error > state.error + moments.rounding:
        return False
    after, _ = _residual(moments, step, codes)
    return step.error < state.error - moments.rounding or np.abs(after[free]).max() < np.abs(residual[free]).max()


def _each_alone(moments: Moments, state: _State, codes: Codes, free: NDArray[np.bool_]) -> Vector:
    """Move each free boundary alone to its own optimum with fixed levels, at most a third of the way to its neighbour.

    The limit keeps two neighbours that move towards each other apart.
    """
    s = state.boundaries
    low, high = moments.edges[[0, -1]]
    fence = np.concatenate([[low], s, [high]])
    third = np.diff(fence) / 3
    y = state.levels[codes]
    middle, sign = 0.5 * (y[1:] + y[:-1]), np.sign(y[1:] - y[:-1])
    residual, _ = _residual(moments, state, codes)
    uphill = sign * residual > 0  # dL/ds > 0: go left
    far = np.where(uphill, s - third[:-1], s + third[1:])
    for kink in moments.activation.kinks:  # do not step over a kink: stop at it
        between = (kink - s) * (kink - far) < 0
        far = np.where(between, kink, far)
    near = s.copy()
    for _ in range(60):  # halvings, to the last digit
        half = 0.5 * (near + far)
        still = sign * (moments.centred(half) - middle) * np.where(uphill, 1, -1) > 0
        near = np.where(still, half, near)
        far = np.where(still, far, half)
    # `far` is the first point where the descent ends, or the limit.
    return np.where(free & (sign != 0), far, s)
