"""What a plan is compared with: plans for other memories, and other ways to train."""

import logging
from collections.abc import Callable, Sequence

from ...tables import FewbitError
from .document import Point
from .problem import EXACT, RECOMPUTE, Limits, Option, Price, Problem
from .solver import solve

_log = logging.getLogger("fewbit.plan")
_UNIFORM = (2, 3, 4, 6, 8)


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
    of_tensor = {o.covers[0]: o for o in problem.options if o.method == EXACT}
    points = [_point("exact", problem, list(of_tensor.values()))]
    for bits in _UNIFORM:
        few = {o.covers[0]: o for o in uniform(bits)}
        points.append(_point(f"{bits} bits", problem, list({**of_tensor, **few}.values())))
    blocks = [o for o in problem.options if o.method == RECOMPUTE and o.bits is None]
    outermost = [o for o in blocks if not any(set(o.covers) < set(other.covers) for other in blocks)]
    if outermost:
        covered = {i for o in outermost for i in o.covers}
        rest = [o for i, o in of_tensor.items() if i not in covered]
        points.append(_point("checkpointing", problem, [*outermost, *rest]))
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


def _point(name: str, problem: Problem, chosen: Sequence[Option]) -> Point:
    error = sum(o.error for o in chosen) ** 0.5
    time = 1 + sum(o.seconds for o in chosen) / max(problem.seconds, 1e-9)
    return Point(name, problem.fixed + int(problem.usage(chosen).max()), error, time)
