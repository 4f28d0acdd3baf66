"""Solves the planner's problem (problem.py) by mixed-integer linear programming, with HiGHS of scipy.

A binary variable an option; a row a tensor, that one of the options which cover it is chosen; a row a moment, that
memory suffices. HiGHS solves it by branch and bound, whose relaxation bounds the price from below: the gap between the
two is what a better plan could still gain.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from ...tables import FewbitError
from ...tables.sizes import size_like
from .problem import Limits, Option, Price, Problem, Solution

_TOLERANCE = 2e-6  # of HiGHS, relative to a row of the size of 1
# Options that the solver is given at once. Of more, those of runs of equal layers are merged, to about so many: a
# problem of 1,500 takes some seconds, one of 300 a second, and its plans' price is about 2 % higher.
MOST_OPTIONS, MERGED_OPTIONS = 1500, 300


class NoPlanError(FewbitError):
    """No plan is within the limits: what was asked for is sound, and cannot be had."""


class TooLittleMemoryError(NoPlanError):
    """No plan fits into a memory; `least` is the one of least memory within the limits on error and time."""

    def __init__(self, message: str, least: Solution) -> None:
        super().__init__(message)
        self.least = least

    def __reduce__(self) -> tuple[type[FewbitError], tuple[str]]:
        return FewbitError, (str(self),)  # as one process tells another


def nearest_refusal(refusals: Sequence[FewbitError]) -> FewbitError:
    """Return what says the least memory of all, of what was said of a step by several ways; else what was said first:
    a way that computes again may be refused for its time alone."""
    of_memory = [error for error in refusals if isinstance(error, TooLittleMemoryError)]
    return min(of_memory, key=lambda error: error.least.price, default=refusals[0])


@dataclass(frozen=True)
class Effort:
    """When a solution is good enough.

    Attributes:
        gap: of its price from the bound, relative.
        seconds: after which the best solution so far is taken, with its gap.
    """

    gap: float = 1e-4
    seconds: float = 20.0


def solve(problem: Problem, limits: Limits, price: Price | None = None, effort: Effort | None = None) -> Solution:
    """Return the options of least price within `limits`; of least memory if memory is not limited.

    Args:
        problem: what is to be planned.
        limits: on memory, error and time.
        price: weights of error and time.
        effort: when the solver stops.

    Raises:
        TooLittleMemoryError: no plan fits into the memory; it has the plan of least memory.
        NoPlanError: there is none within the limits on error and time.
        FewbitError: nothing is limited.
    """
    price, effort = price or Price(), effort or Effort()
    if limits == Limits():
        raise FewbitError("limit memory, error or time: without limits the plan is to save all exactly")
    if limits.memory is not None:
        found = _solve(problem, limits, limits.memory - problem.fixed, price, effort)
        if found is not None:
            return found
    least = _solve(problem, replace(limits, memory=None), None, price, effort)
    if least is None:
        said = [f"{name}={value}" for name in ("error", "time") if (value := getattr(limits, name)) is not None]
        raise NoPlanError(f"no plan is within {' and '.join(said)}")
    peak = _peak(problem, least.chosen)
    if limits.memory is None:
        # Of the plans of the least memory the one of the least price.
        found = _solve(problem, limits, peak - problem.fixed, price, effort)
        return least if found is None else replace(found, price=_peak(problem, found.chosen), bound=least.bound)
    within = "" if limits.error is None and limits.time is None else " within these limits on error and time"
    fits = f"no plan{within} fits into {size_like(limits.memory, limits.memory)}"
    text = f"{fits}: the least is {size_like(peak, limits.memory, exactly=True)}"
    raise TooLittleMemoryError(text, replace(least, price=peak))


def is_feasible(problem: Problem, limits: Limits) -> bool:
    """Return whether there is a plan within `limits`, of which memory is one."""
    assert limits.memory is not None
    least = _solve(problem, replace(limits, memory=None), None, Price(), Effort())
    return least is not None and _peak(problem, least.chosen) <= limits.memory


def _peak(problem: Problem, chosen: Iterable[Option]) -> int:
    return problem.fixed + int(problem.usage(chosen).max())


def _solve(problem: Problem, limits: Limits, memory: int | None, price: Price, effort: Effort) -> Solution | None:
    """Return the solution within `memory` bytes without what is fixed, or that of least memory; None if there is none.

    HiGHS keeps a limit but for its tolerance; a solution that exceeds the memory by it is sought again within less.
    """
    if not problem.options:  # nothing is saved that could be rounded
        peak = int(problem.base.max())
        if memory is None:
            return Solution((), problem.fixed + peak, problem.fixed + peak)
        return Solution((), 0.0, 0.0) if peak <= memory else None
    for tolerance in (0.0, _TOLERANCE):
        found = _solve_within(problem, limits, memory, price, effort, tolerance)
        if found is None or memory is None or int(problem.usage(found.chosen).max()) <= memory:
            return found
    return None


def _solve_within(
    problem: Problem, limits: Limits, memory: int | None, price: Price, effort: Effort, tolerance: float
) -> Solution | None:
    """Return the solution within `memory` bytes less a tolerance, or that of least memory; None if there is none.

    Variables are the options and, to minimise it, the peak, in units of the exact one.
    """
    options = problem.options
    count = len(options)
    prices = np.array([price.of(option, problem.seconds) for option in options])
    scale = float(np.median(prices[prices > 0])) if (prices > 0).any() else 1.0  # tolerances are absolute
    with_peak, moments = memory is None, problem.moments
    covered = np.array([(i, j) for j, option in enumerate(options) for i in option.covers], np.int64).reshape(-1, 2)
    covers = csr_array((np.ones(len(covered)), covered.T), shape=(problem.tensors, count + with_peak))
    unit = float(max(problem.base.max() + 1, 1) if memory is None else max(memory, 1))
    held = csr_array(problem.held_at(moments) / unit)
    base = problem.base[moments] / unit
    held = hstack([held, -csr_array(np.ones((len(moments), 1)))]) if with_peak else held
    most = -base if with_peak else 1 + 0.5 / unit - tolerance - base  # bytes are whole numbers
    constraints = [
        LinearConstraint(covers, 1, 1),
        LinearConstraint(held, np.full(len(most), -np.inf), most),  # pyright: ignore[reportArgumentType]
    ]
    limited: list[NDArray[np.float64]] = []
    if limits.error is not None:
        limited.append(_in_units(limits.error**2, (option.error for option in options)))
    if limits.time is not None:
        limited.append(_in_units((limits.time - 1) * problem.seconds, (option.seconds for option in options)))
    allowed = np.ones(count)
    for row in limited:
        constraints.append(LinearConstraint(np.append(row, [0.0] * with_peak)[None], -np.inf, 1.0))
        allowed *= row <= 1
    with _quiet():
        found = milp(
            np.append(np.zeros(count), 1.0) if with_peak else prices / scale,
            integrality=np.append(np.ones(count), 0.0) if with_peak else np.ones(count),
            bounds=Bounds(0, np.append(allowed, np.inf if with_peak else [])),  # pyright: ignore[reportArgumentType]
            constraints=constraints,
            options={"mip_rel_gap": effort.gap, "time_limit": effort.seconds},
        )
    if found.x is None:
        return None
    chosen = tuple(option for option, x in zip(options, found.x[:count], strict=True) if x > 0.5)
    bound = found.mip_dual_bound
    bound = float(found.fun if bound is None else bound)
    if with_peak:
        return Solution(chosen, float(found.fun) * unit + problem.fixed, bound * unit + problem.fixed)
    return Solution(chosen, float(found.fun) * scale, bound * scale)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what is written to standard output: HiGHS 1.8 to 1.12 writes a line where it repairs a solution."""
    sys.stdout.flush()
    try:
        output = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(nowhere)
        os.close(output)


def _in_units(most: float, quantities: Iterable[float]) -> NDArray[np.float64]:
    """Return quantities in units of the most that is allowed, and 2 for more: HiGHS keeps no row of huge numbers."""
    own = np.array([*quantities])
    return np.minimum(own / most, 2.0) if most > 0 else np.where(own > 0, 2.0, 0.0)


def merge(problem: Problem, kinds: list[str], above: int = MOST_OPTIONS, most: int = MERGED_OPTIONS) -> Problem:
    """Return a problem of few options, in which runs of equal tensors are covered together; of few, the same.

    Args:
        problem: with tensors in the order of the forward pass.
        kinds: of each tensor; equal tensors, such as those of one place in several equal layers, have equal kinds.
        above: number of options that are not merged.
        most: about so many are left.
    """
    if len(problem.options) <= above:
        return problem
    members: defaultdict[str, list[int]] = defaultdict(list)
    for i, kind in enumerate(kinds):
        members[kind].append(i)
    runs = max(1, int(most / (len(problem.options) / max(1, problem.tensors)) / len(members)))
    run_of = {i: place * runs // len(each) for each in members.values() for place, i in enumerate(each)}
    # Together are options of one method and number of bits, for equal tensors of a run.
    groups: defaultdict[tuple[object, ...], list[Option]] = defaultdict(list)
    for option in problem.options:
        covered = tuple(sorted(kinds[i] for i in option.covers))
        groups[option.method, option.bits, covered, min(run_of[i] for i in option.covers)].append(option)
    merged = (
        Option(
            each[0].method,
            ",".join(o.target for o in each),
            each[0].bits,
            tuple(i for o in each for i in o.covers),
            tuple(hold for o in each for hold in o.holds),
            *(sum(getattr(o, name) for o in each) for name in ("saved", "noise", "bias", "seconds")),
        )
        for each in groups.values()
    )
    return replace(problem, options=tuple(merged))


def split(solution: Solution, options: tuple[Option, ...]) -> Solution:
    """Return the solution of a merged problem in the options of the problem that it was merged of."""
    by_key = {(o.method, o.bits, o.target): o for o in options}
    chosen = tuple(by_key[o.method, o.bits, target] for o in solution.chosen for target in o.target.split(","))
    return replace(solution, chosen=chosen)
