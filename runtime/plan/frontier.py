"""What a plan is compared with: plans for other memories, other ways to train, and memory through the step."""

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...tables import FewbitError
from .document import Point, Timeline
from .problem import EXACT, RECOMPUTE, Limits, Option, Price, Problem
from .solver import solve

_log = logging.getLogger("fewbit.plan")
MOMENTS = 400  # most that a timeline keeps
_UNIFORM = (2, 3, 4, 6, 8)


def timeline_of(
    problem: Problem,
    chosen: Sequence[Option],
    exact: Sequence[Option],
    gradients: NDArray[np.int64],
    backward: int,
) -> Timeline:
    """Return memory through the step, in at most `MOMENTS` moments: of each stretch the one with the most memory."""
    usage = problem.usage(chosen)
    stretch = -(-len(usage) // MOMENTS)
    starts = range(0, len(usage), stretch)
    at = np.array([start + int(np.argmax(usage[start : start + stretch])) for start in starts])
    saved = usage - problem.base
    exactly = problem.usage(exact) - problem.base
    curves = exactly, saved, gradients, problem.base - gradients
    return Timeline(*(tuple(map(int, curve[at])) for curve in curves), backward=backward // stretch)


Uniform = Callable[[int], Sequence[Option]]


def points_of(problem: Problem, merged: Problem, uniform: Uniform, count: int, price: Price) -> tuple[Point, ...]:
    """Return plans for `count` memories from the least to that of exact training, and other ways to train.

    Args:
        problem: of the step.
        merged: the same, of fewer options, to solve.
        uniform: returns the options to save each tensor in so many bits, though a plan may give it no so few.
        count: number of plans.
        price: by which plans are compared.
    """
    exact = [o for o in problem.options if o.method == EXACT]
    points = [_point("exact", problem, exact), *_others(problem, uniform)]
    least = int(solve(merged, Limits(time=1e6), price).price)
    most = points[0].memory
    for i in range(count):
        memory = int(least + (most - least) * i / max(1, count - 1)) + 1
        _log.info("plan %d of %d for other memories", i + 1, count)
        try:
            points.append(_point("plan", merged, solve(merged, Limits(memory=memory), price).chosen))
        except FewbitError:  # just below the least
            continue
    return tuple(points)


def _others(problem: Problem, uniform: Uniform) -> Iterable[Point]:
    of_tensor = {o.covers[0]: o for o in problem.options if o.method == EXACT}
    for bits in _UNIFORM:
        few = {o.covers[0]: o for o in uniform(bits)}
        yield _point(f"{bits} bits", problem, list({**of_tensor, **few}.values()))
    blocks = [o for o in problem.options if o.method == RECOMPUTE and o.bits is None]
    outermost = [o for o in blocks if not any(set(o.covers) < set(other.covers) for other in blocks)]
    if outermost:
        covered = {i for o in outermost for i in o.covers}
        rest = [o for i, o in of_tensor.items() if i not in covered]
        yield _point("checkpointing", problem, [*outermost, *rest])


def _point(name: str, problem: Problem, chosen: Sequence[Option]) -> Point:
    error = sum(o.error for o in chosen) ** 0.5
    time = 1 + sum(o.seconds for o in chosen) / max(problem.seconds, 1e-9)
    return Point(name, problem.fixed + int(problem.usage(chosen).max()), error, time)
