"""Plans a step: measures it, solves the problem, and says what the solution takes.

1  trace     a step that saves nothing: memory at each moment, and the life of each saved tensor (trace.py)
2  measure   what each way to save does to the gradient (ways/, errors.py), and what it takes of time (seconds.py)
3  solve     one option for each tensor, within the memory at every moment (known.py, problem.py)
4  once more by ways that change the whole step, where that plan is not exact (ways/): the loss in chunks, MLPs in tiles
5  carry out tables, recomputed blocks and hooks (fitted.py)
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...tables import FewbitError
from ...tables.sizes import size_like
from ..memory.listing import size_text
from ..tensors.traits import tensors_among
from .compiled import AnyKnown
from .compiled_run import budget_runs
from .document import Choice, PeakMemory, Plan, Point, Timeline, signature
from .errors import Trial, errors_by_shape, finite
from .known import Known
from .problem import AND, EXACT, RECOMPUTE, Hold, Limits, Option, Price, Problem, Solution
from .seconds import Measured, Roofline, Speeds, device_of
from .solver import (
    Effort,
    NoPlanError,
    TooLittleMemoryError,
    is_feasible,
    merge,
    nearest_refusal,
    solve,
    split,
)
from .static import Parallel, Static
from .step import Step
from .structure import structure_aside
from .trace import trace
from .ways import WAYS_TO_SAVE
from .ways.steps import WAYS_OF_STEPS, Way, carry_out, known_by

_log = logging.getLogger("fewbit.plan")  # says at level INFO what is done, since that takes up to minutes
UNIFORM = (2, 3, 4, 6, 8)  # bits of ways to train that a plan is compared with
BUDGETS = (1.0, 0.5, 0.0)  # of torch's, in pictures
MOMENTS = 400  # most that a timeline keeps
_NOTED = Effort(gap=1e-2)  # for what more memory would bring, which is not carried out


@dataclass
class Planner:
    """One call of `plan`, for a step that is not compiled.

    Attributes:
        step: model, batch, loss.
        limits, price, gpu, recompute, frontier: as for `plan`.
        static: memory of parameters and optimizer, of a process without others.
        parallel: kind of parallelism.
        speeds: in place of those that are measured or estimated.
        share: of the exact step's peak, in place of a memory in bytes, which is known once the step is traced.
    """

    compiled: ClassVar[bool] = False
    step: Step
    limits: Limits
    price: Price
    static: Static
    gpu: str | None
    recompute: bool
    frontier: int = 0
    parallel: Parallel = field(default_factory=Parallel)
    speeds: Speeds | None = None
    share: float | None = None

    def plan(self) -> Plan:
        """Return the plan for the step's batch."""
        known = self.measured_eagerly(refuses=True)
        return replace(self, limits=self.limits_beside(known)).best_eager(known)

    def limits_beside(self, exact: AnyKnown) -> Limits:
        """Return the limits, with the memory that is a share of the peak of a step that saves all exactly."""
        if self.share is None:
            return self.limits
        return replace(self.limits, memory=int(self.share * self.problem(exact).exact_peak()))

    def best_eager(self, plain: Known) -> Plan:
        """Return the best plan for a step as it is, or by ways that change it as a whole.

        These are exact, but for the order of sums: where exact training fits, or a plan that costs as little, the
        step stays as it is, bit for bit.

        Args:
            plain: what was measured of the step as it is.

        Raises:
            FewbitError: none is within the limits.
        """
        found: list[tuple[Plan, Known]] = []
        refusals: list[FewbitError] = []
        for known in self.eager_ways(plain):
            least = min((self.cost(plan) for plan, _ in found), default=math.inf)
            if self.limits.memory is not None and self.price.time * known.taken >= least:
                continue  # its time alone costs more
            try:
                found.append((self.solved(known), known))
            except FewbitError as error:
                refusals.append(error)
            else:
                if self.cost(found[-1][0]) <= 0:
                    break
        if not found:
            raise nearest_refusal(refusals)
        plan, known = min(found, key=lambda each: self.cost(each[0]))
        return self.beside_exact(plan, known, plain)

    def least(self) -> Plan:
        """Return the plan of least memory, by the ways that `plan` tries before it refuses."""
        tried = [*self.eager_ways(self.measured_eagerly())]
        found: list[tuple[Plan, Known]] = []
        for known in reversed(tried):  # the last has the least base, below which the others often cannot go: no logits
            if not found or self.problem(known).floor() < min(plan.peak.total for plan, _ in found):
                found.append((self.solved(known), known))
        return self.beside_exact(*min(found, key=lambda each: each[0].peak.total), plain=tried[0])

    def eager_ways(self, plain: Known) -> Iterator[Known]:
        """Yield a step as it is, and then, where that is asked for, by one way more each time."""
        yield (known := plain)
        for way in self.ways_of_steps:
            _log.info("tracing the step %s", way.method)
            changed = partial(self.changed, known.changes)
            if (other := known_by(way, known, self.step, changed)) is not None:
                yield (known := other)

    @property
    def ways_of_steps(self) -> list[Way]:
        """The ways that a plan may change the step by; none of ranks, which would not all try the same."""
        if self.step.is_tensor_parallel:
            return []
        return [way for way in WAYS_OF_STEPS if self.recompute or not way.computes_again]

    @contextmanager
    def changed(self, changes: Sequence[Choice]) -> Iterator[None]:
        """Change the model by choices of ways within this block."""
        with structure_aside(self.step.model):
            carry_out(self.step.model, changes)
            yield

    def beside_exact(self, plan: Plan, known: Known, plain: Known) -> Plan:
        """Return a plan with the peak of the step as it is, and the frontier if it is asked for: plans for the step of
        this plan, beside other ways to train the step as it is."""
        exact = self.problem(plain).exact_peak()
        if not self.frontier:
            return replace(plan, exact_peak=exact)
        plans = [replace(point, time=point.time + known.taken) for point in self.plan_points(known)]
        return replace(plan, exact_peak=exact, frontier=(*plans, *self.other_points(plain)))

    def cost(self, plan: Plan) -> float:
        """Return what plans are compared by: their price, or the memory where that is sought."""
        if self.limits.memory is None:
            return plan.peak.total
        noise, bias = plan.error**2 - plan.bias**2, plan.bias**2
        return self.price.noise * noise + self.price.bias * bias + self.price.time * (plan.time - 1)

    def measured_eagerly(self, refuses: bool = False) -> Known:
        """Trace and measure a step that is not compiled.

        Args:
            refuses: whether the step itself has to fit: the trace of one that cannot is refused.
        """
        step = self.step
        _log.info("tracing a step")
        traced = trace(step)
        ways = tuple(way for way in WAYS_TO_SAVE if self.recompute or RECOMPUTE not in way.methods)

        def estimated(speeds: Speeds) -> Known:
            of_tensors = errors_by_shape(traced)
            errors = {m: e for way in ways for m, e in way.estimate(step, traced, of_tensors).items()}
            return Known(traced, ways, errors, speeds)

        if refuses and not step.is_abstract:
            self.refuse_too_little(estimated(Speeds()))
        _log.info("timing the quantizers")
        speeds = self.speeds
        if speeds is None:
            is_here = not self.step.is_abstract and self.gpu is None
            speeds = Measured(step) if is_here else Roofline(step, device_of(self.gpu or "a100"))
        if self.step.is_abstract:
            return estimated(speeds)
        _log.info("measuring what rounding does to the gradient")
        part, errors = step.part(), {}
        with part.step.apart():
            trial = Trial(part.step)
            for way in ways:
                for method, found in way.measure(step, traced, trial).items():
                    errors[method] = {name: e.times(part.noise, part.bias) for name, e in finite(found).items()}
        return Known(traced, ways, errors, speeds)

    def refuse_too_little(self, plain: Known) -> None:
        """Refuse a memory below what any choice takes, before errors and times are measured, which takes minutes.

        Args:
            plain: what a trace alone says of the step as it is.

        Raises:
            TooLittleMemoryError: as `plan` would in the end.
        """
        memory, refusals = self.limits_beside(plain).memory, list[FewbitError]()
        if memory is None:
            return
        for known in self.eager_ways(plain):
            if self.problem(known).floor() <= memory:
                return
            try:
                self.solved(known, Limits(memory=memory))
            except FewbitError as error:
                refusals.append(error)
        raise nearest_refusal(refusals)

    def solved(self, known: AnyKnown, limits: Limits | None = None) -> Plan:
        """Return the plan for what was measured.

        Raises:
            FewbitError: there is none within the limits.
        """
        problem = self.problem(known)
        merged = merge(problem, known.kinds)
        _log.info("solving")
        try:
            solution = solve(merged, self.within(known, limits or self.limits), self.price)
        except TooLittleMemoryError as error:
            least = split(error.least, problem.options) if merged is not problem else error.least
            text = f"{error}, {self.refusal(self.document(known, problem, least, []))}"
            raise TooLittleMemoryError(text, least) from None
        if merged is not problem:
            solution = split(solution, problem.options)
        return self.document(known, problem, solution, self.notes(known, problem, merged, solution))

    def refusal(self, least: Plan) -> str:
        """Return what the plan of least memory takes it for, and what else may be tried, on the line of an error."""
        peak = least.peak
        parts = {name: getattr(peak, name) for name in ("parameters", "gradients", "optimizer", "saved", "workspace")}
        unit_of = self.limits.memory or peak.total
        made_of = ", ".join(f"{name} {size_like(size, unit_of)}" for name, size in parts.items() if size)
        is_limited = self.limits.error is not None or self.limits.time is not None
        return f"{peak.moment}: {made_of}; try {self.remedies(peak, is_limited)}"

    def remedies(self, peak: PeakMemory, is_limited: bool = False) -> str:
        """Return what else may be tried, in words.

        Args:
            peak: of the plan of least memory.
            is_limited: whether error or time were limited, too.
        """
        inputs = tensors_among(self.step.inputs, self.step.keywords)
        has_tokens = any(t.dim() == 2 and t.shape[1] > 1 and not t.is_floating_point() for t in inputs)
        # What a step saves and works with; the rest is there whatever the batch.
        of_step = peak.saved + peak.workspace > peak.total // 10
        is_frozen = peak.gradients < peak.parameters // 10
        tries = [
            ("a smaller batch", self.step.samples > 1 and of_step),
            ("shorter sequences", has_tokens and of_step),
            ("a compiled step, compiled=True or --compiled", not self.compiled and of_step),
            ("frozen weights in 4 bits, as of QLoRA", is_frozen and peak.parameters > peak.total // 4),
            ("another optimizer, such as adamw8bit or sgd", peak.optimizer > peak.total // 10),
            ("recompute", not self.recompute),
            ("more error or time", is_limited),
            ("shards, parallel fsdp:8", peak.parameters + peak.optimizer > peak.total // 4 and not self.compiled),
            ("fewer trained parameters, as of LoRA", peak.gradients + peak.optimizer > peak.total // 4),
        ]
        return "; ".join(name for name, helps in tries if helps) or "a smaller model or batch"

    def plan_points(self, known: AnyKnown) -> list[Point]:
        """Return plans for memories from the least to that of exact training."""
        problem = self.problem(known)
        merged, most = merge(problem, known.kinds), problem.exact_peak()
        least = int(solve(merged, Limits(time=1e6), self.price).price)
        points = []
        for i in range(self.frontier):
            memory = int(least + (most - least) * i / max(1, self.frontier - 1)) + 1
            _log.info("plan %d of %d for other memories", i + 1, self.frontier)
            with suppress(FewbitError):  # just below the least
                points.append(_point("plan", merged, solve(merged, Limits(memory=memory), self.price).chosen))
        return points

    def other_points(self, known: AnyKnown) -> list[Point]:
        """Return other ways to train: exactly, all in so many bits, by checkpointing, and by torch's own compiler."""
        problem = self.problem(known)
        of_tensor = {o.covers[0]: o for o in problem.options if o.method == EXACT}
        points = [_point("exact", problem, list(of_tensor.values()))]
        for bits in UNIFORM:  # though a plan may give a tensor no so few
            few = {o.covers[0]: o for o in self.in_flight(known.uniform(bits), known)}
            points.append(_point(f"{bits} bits", problem, list({**of_tensor, **few}.values())))
        blocks = [o for o in problem.options if o.method == RECOMPUTE and o.bits is None]
        outermost = [o for o in blocks if not any(set(o.covers) < set(other.covers) for other in blocks)]
        if outermost:
            covered = {i for o in outermost for i in o.covers}
            rest = [o for i, o in of_tensor.items() if i not in covered]
            points.append(_point("checkpointing", problem, [*outermost, *rest]))
        if self.step.is_abstract or self.step.device.type == "meta":
            return points
        for ratio, record, seconds in budget_runs(self.step, BUDGETS):
            name = "torch.compile" if ratio == 1 else f"torch's budget {ratio:g}"
            points.append(Point(name, self.of_rank.fixed + record.peak, 0.0, seconds / problem.seconds))
        return points

    def within(self, known: AnyKnown, limits: Limits) -> Limits:
        """Return the limits of what is still to be chosen: what the step computes again has taken some of the time.

        Raises:
            FewbitError: it has taken more than there is.
        """
        if limits.time is None or not known.taken:
            return limits
        if limits.time < 1 + known.taken:
            raise NoPlanError(f"no plan is within time={limits.time}")
        return replace(limits, time=limits.time - known.taken)

    def problem(self, known: AnyKnown) -> Problem:
        """Return the problem, whose last moment is the optimizer's step."""
        problem = known.problem(self.step, self.of_rank.fixed)
        gradients = self.parallel.gradients(known.gradients)
        base = problem.base - known.gradients + gradients
        base += self.parallel.workspace(len(base), known.backward)
        others, moment = self.parallel.in_flight - 1, known.backward
        base += others * int(problem.base[moment] - known.gradients[moment])
        return replace(
            problem,
            options=tuple(self.in_flight(problem.options, known)),
            base=np.append(base, int(gradients[-1]) + known.left + self.of_rank.update),
        )

    def in_flight(self, options: Iterable[Option], known: AnyKnown) -> Iterator[Option]:
        """Yield options with what they hold of other batches in flight, whose backward pass has not begun."""
        others, moment, end = self.parallel.in_flight - 1, known.backward, len(known.gradients)
        for option in options:
            held = others * sum(h.nbytes for h in option.holds if h.start <= moment < h.end)
            yield replace(option, holds=(*option.holds, Hold(0, end, held))) if held else option

    @property
    def of_rank(self) -> Static:
        """Memory of parameters and optimizer of one rank."""
        return self.parallel.static(self.static)

    def document(self, known: AnyKnown, problem: Problem, solution: Solution, notes: list[str]) -> Plan:
        """Return the plan that a solution stands for."""
        exact = [o for o in problem.options if o.method == EXACT]
        exact_bytes = {o.covers[0]: o.saved for o in exact}
        order = sorted(solution.chosen, key=lambda o: o.covers[0])
        choices = [*known.changes, *(choice for o in order for choice in _choices(o, exact_bytes))]
        usage = problem.usage(solution.chosen)
        at = int(np.argmax(usage))
        gradients = self.parallel.gradients(known.gradients)
        gradients = np.append(gradients, gradients[-1])
        moment = "in the optimizer's step" if at == len(usage) - 1 else known.moment(at)
        # Options may also spare what a step that saves nothing makes at that moment.
        saved = sum(h.nbytes for o in solution.chosen for h in o.holds if h.nbytes > 0 and h.start <= at < h.end)
        peak = PeakMemory(
            *(self.of_rank.parameters, int(gradients[at]), self.of_rank.optimizer, saved),
            *(int(usage[at] - gradients[at]) - saved, moment),
        )
        return Plan(
            signature(self.step.model),
            tuple(choices),
            peak,
            problem.exact_peak(),
            *(solution.error, solution.bias**0.5, problem.seconds, solution.gap),
            {"memory": self.limits.memory, "error": self.limits.error, "time": self.limits.time},
            self.step.samples,
            self.compiled,
            timeline_of(problem, solution.chosen, exact, gradients, known.backward),
            tuple(notes),
            recompute=known.recompute,
            recompute_seconds=known.recompute_seconds,
            host_memory=known.host_memory,
        )

    def notes(self, known: AnyKnown, problem: Problem, merged: Problem, solution: Solution) -> list[str]:
        """Return what was estimated, and what more memory would bring."""
        notes = []
        if len(merged.options) < len(problem.options):
            notes.append("this bound is of plans that treat equal layers alike, in runs of several")
        if self.step.is_abstract:
            notes.append("errors are estimated from shapes, not measured; times are those of a roofline")
        elif self.gpu is not None:
            notes.append(f"times are those of a roofline for {self.gpu}, not measured")
        if self.limits.memory is not None and solution.price > 0:
            more = int(self.limits.memory * 1.1)
            better = solve(merged, replace(self.limits, memory=more), self.price, _NOTED)
            notes.append(
                f"with {size_text(more)}: error {better.error:.3g}, time "
                f"{1 + known.taken + better.seconds / max(merged.seconds, 1e-9):.3f}"
            )
        return notes

    def is_feasible(self, known: Known) -> bool:
        """Return whether there is a plan within the limits."""
        problem = merge(self.problem(known), known.kinds)
        return is_feasible(problem, self.limits)


def _point(name: str, problem: Problem, chosen: Sequence[Option]) -> Point:
    error = sum(o.error for o in chosen) ** 0.5
    time = 1 + sum(o.seconds for o in chosen) / max(problem.seconds, 1e-9)
    return Point(name, problem.fixed + int(problem.usage(chosen).max()), error, time)


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


def _choices(option: Option, exact_bytes: Mapping[int, int]) -> Iterator[Choice]:
    """Yield the choice that an option stands for, and that of the tensor that it holds exactly besides."""
    target, _, besides = option.target.partition(AND)
    covered, of_besides = sum(exact_bytes[i] for i in option.covers), 0
    if besides:
        of_besides = exact_bytes[option.covers[-1]]
        yield Choice(besides, EXACT, None, of_besides, of_besides, 0.0, 0.0, 0.0)
    held = covered - of_besides, option.saved - of_besides
    yield Choice(target, option.method, option.bits, *held, option.noise, option.bias, option.seconds)
