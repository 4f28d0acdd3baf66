"""The planner's problem, and its solution: each saved tensor is covered by one option, within memory at every moment.

    minimise    Σ price(option)         over the chosen options
    such that   each tensor is in the cover of exactly one chosen option
                base(τ) + Σ bytes that chosen options hold at τ  ≤  memory,     at every moment τ
                Σ seconds ≤ time,   Σ squared errors ≤ error²                    where they are limited

An option may cover one tensor (save it exactly, in 4 bits) or several (recompute a block; save codes of a table in
place of all that an activation saves). What it holds is a list of bytes between two moments, so that recomputing a
block, which saves little but holds much for a moment of the backward pass, is an option like any other. `base` is the
memory of a step that saves none of the tensors: activations while they are used, temporary results, gradients.
Moments count the allocations of a traced step (trace.py).

HiGHS of scipy solves it by branch and bound, as a mixed-integer linear program: a binary variable an option; a row a
tensor, that one of the options which cover it is chosen; a row a moment, that memory suffices. Its relaxation bounds
the price from below: the gap between the two is what a better plan could still gain.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from ...tables import FewbitError
from ...tables.sizes import size_like

EXACT, GROUPS, HOST, RECOMPUTE = "exact", "groups", "host", "recompute"
TABLE, STOCHASTIC, ATTENTION, GATED, OUTPUT = "table", "stochastic", "attention", "gated", "output"
CHAIN, OUTLIERS, ROTATED, CHUNKED, TILED = "chain", "outliers", "rotated", "chunked", "tiled"
FLOAT8 = "float8"
OF_TENSORS = (EXACT, GROUPS, HOST, OUTLIERS, ROTATED, FLOAT8)
OF_STEPS = (CHUNKED, TILED)  # which ways/ has, a file each
METHODS = (*OF_TENSORS, RECOMPUTE, TABLE, STOCHASTIC, ATTENTION, GATED, OUTPUT, CHAIN, *OF_STEPS)
AND = "|"  # between a target and another that its option holds exactly
_TOLERANCE = 2e-6  # of HiGHS, relative to a row of the size of 1
ALL_GRAPHS = "all compiled graphs"  # the target that stands for all that a compiled step saves


@dataclass(frozen=True)
class Hold:
    """Bytes that are held from the moment `start` until before the moment `end`."""

    start: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Option:
    """One way to have tensors again in the backward pass.

    Attributes:
        method: one of `METHODS`.
        target: the place of the tensor, or the name of the module, that it is for.
        bits: of the codes, None where there are none.
        covers: indices of the tensors.
        holds: the memory that it takes.
        saved: bytes from forward to backward pass, as a report shows them.
        noise: the mean squared error that it adds to the gradient, relative to the gradient's squared norm, as far as
            it averages out over steps.
        bias: the rest of the squared error, which does not.
        seconds: that it adds to a step.
    """

    method: str
    target: str
    bits: int | None
    covers: tuple[int, ...]
    holds: tuple[Hold, ...]
    saved: int
    noise: float = 0.0
    bias: float = 0.0
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """The squared error of the gradient."""
        return self.noise + self.bias


@dataclass(frozen=True)
class Problem:
    """Tensors, options and limits.

    Attributes:
        tensors: number of tensors to cover.
        options: each tensor has at least one of its own.
        base: bytes at each moment of the step, without what options hold.
        fixed: bytes that are there throughout: parameters, the optimizer's state.
        seconds: of an exact step.
    """

    tensors: int
    options: tuple[Option, ...]
    base: NDArray[np.int64]
    fixed: int
    seconds: float

    def usage(self, chosen: Iterable[Option]) -> NDArray[np.int64]:
        """Return the bytes at each moment with the chosen options, without `fixed`."""
        change = np.zeros(len(self.base) + 1, np.int64)
        for option in chosen:
            for hold in option.holds:
                change[hold.start] += hold.nbytes
                change[hold.end] -= hold.nbytes
        return self.base + np.cumsum(change[:-1])

    def exact_peak(self) -> int:
        """Return the bytes of the peak of a step that saves all exactly."""
        return self.fixed + int(self.usage(o for o in self.options if o.method == EXACT).max())

    def floor(self) -> int:
        """Return bytes of the peak that no choice goes below: those of the largest moment, with all that options may
        spare of what is there anyway."""
        at, spared = int(np.argmax(self.base)), dict[int, int]()
        for option in self.options:
            held = sum(h.nbytes for h in option.holds if h.start <= at < h.end)
            spared[option.covers[0]] = min(held, spared.get(option.covers[0], 0))
        return self.fixed + int(self.base[at]) + sum(spared.values())

    @cached_property
    def moments(self) -> NDArray[np.int64]:
        """The moments at which memory may be largest, whatever is chosen.

        Of the moments between which no option's memory changes, the one with the largest base; and of these none at
        which every option holds no more, and the base is no larger, than at another.
        """
        edges = sorted({0, *(t for o in self.options for h in o.holds for t in (h.start, h.end) if t < len(self.base))})
        largest = np.array(
            [a + int(np.argmax(self.base[a:b])) for a, b in zip(edges, [*edges[1:], len(self.base)], strict=True)]
        )
        # Options that hold bytes in the same proportions say the same, such as the numbers of bits of one tensor.
        alike = dict[tuple[object, ...], int]()
        for j, option in enumerate(self.options):
            most = max((abs(hold.nbytes) for hold in option.holds), default=1) or 1
            alike[tuple((hold.start, hold.end, round(hold.nbytes / most, 6)) for hold in option.holds)] = j
        held, base = self.held_at(largest)[:, sorted(alike.values())], self.base[largest]
        order = np.argsort(-(base + held.sum(1) / max(1, self.tensors)), kind="stable")
        held, base = held[order], base[order]
        table = np.column_stack([base, held])
        kept: list[int] = []
        rows, last = np.empty_like(table), 0
        for row, place in zip(table, order, strict=True):
            count = len(kept)
            if count and (rows[last] >= row).all():  # what dominated the moment before, often dominates this one
                continue
            above = np.flatnonzero((rows[:count] >= row).all(1))
            if len(above):
                last = int(above[0])
                continue
            rows[count] = row
            kept.append(int(place))
        return largest[sorted(kept)]

    def held_at(self, moments: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that each option holds at each of the moments, (moments, options)."""
        held = np.zeros((len(moments), len(self.options)), np.int64)
        for j, option in enumerate(self.options):
            for hold in option.holds:
                first, last = np.searchsorted(moments, (hold.start, hold.end))
                held[first:last, j] += hold.nbytes
        return held


@dataclass(frozen=True)
class Price:
    """What a step's error and time cost, in one unit.

    The unit is about a tenth of a training's loss: transformers trained with derivatives rounded in sixteen ways ended
    above exact training by 0.10 noise² + 0.62 bias². Their ratio is the default's, six (5.1 to 6.9; a ResNet's losses
    scatter too much to tell: 0 to 2; plots/studies/price.py). The weight of time is a choice: a step 10 % longer is as
    bad as a gradient whose relative error, without bias, is 0.1. That costs 0.001 of the loss, and steps that are a
    tenth longer cost more: where the loss falls as a power of 0.1 of the steps, about 0.01.

    Attributes:
        noise: of the squared relative error that averages out.
        bias: of the rest of it.
        time: of the share by which the step takes longer.
    """

    noise: float = 1.0
    bias: float = 6.0
    time: float = 0.1

    def of(self, option: Option, seconds: float) -> float:
        """Return the price of an option in a step that takes `seconds` exactly."""
        return self.noise * option.noise + self.bias * option.bias + self.time * option.seconds / max(seconds, 1e-9)


@dataclass(frozen=True)
class Limits:
    """Most memory, error and time of a plan; None is no limit.

    Attributes:
        memory: bytes of the peak.
        error: relative error of the gradient, the root of the squared error.
        time: of a step, relative to the exact one.
    """

    memory: int | None = None
    error: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Solution:
    """The chosen options.

    Attributes:
        chosen: one that covers each tensor.
        price: Σ prices, or the peak where it was minimised.
        bound: no solution is below; from the solver's relaxation.
    """

    chosen: tuple[Option, ...]
    price: float
    bound: float

    @property
    def gap(self) -> float:
        """The relative distance of the price from the bound, 0 for a proven optimum."""
        return max(0.0, self.price - self.bound) / max(abs(self.price), 1e-12)

    @property
    def noise(self) -> float:
        """The squared relative error of the gradient that averages out."""
        return sum(option.noise for option in self.chosen)

    @property
    def bias(self) -> float:
        """The squared relative error of the gradient that does not."""
        return sum(option.bias for option in self.chosen)

    @property
    def error(self) -> float:
        """The relative error of the gradient."""
        return (self.noise + self.bias) ** 0.5

    @property
    def seconds(self) -> float:
        """What the options add to a step."""
        return sum(option.seconds for option in self.chosen)


# ---- solving ---------------------------------------------------------------------------------------------------------


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


def merge(problem: Problem, kinds: list[str], most: int) -> Problem:
    """Return a problem of at most about `most` options, in which runs of equal tensors are covered together.

    Args:
        problem: with tensors in the order of the forward pass.
        kinds: of each tensor; equal tensors, such as those of one place in several equal layers, have equal kinds.
        most: number of options.
    """
    if len(problem.options) <= most:
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
