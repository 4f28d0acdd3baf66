"""Plans a compiled step: torch's own compiler and budgets are candidates, and a plan is compiled before it counts."""

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import ClassVar

from ...tables import FewbitError
from ...tables.sizes import size_like
from .compiled import CompiledKnown, know_compiled, know_hosted, other_ways
from .compiled_run import compile_step
from .document import Plan
from .eager_planner import Planner
from .known import Known
from .problem import ALL_GRAPHS, Limits
from .seconds import Measured
from .solver import NoPlanError, nearest_refusal
from .trace import trace
from .ways.steps import targets_by_way

log = logging.getLogger("fewbit.plan")
WORTH = 0.03  # of a step's time, by which times of the same step scatter
ATTEMPTS = 6  # at a plan, of which each is compiled


@dataclass
class CompiledPlanner(Planner):
    """One call of `plan` for a step that is compiled.

    Attributes:
        host_memory: as for `plan`.
    """

    compiled: ClassVar[bool] = True
    host_memory: int | None = None

    def plan(self) -> Plan:
        """Return a plan for the step, which is measured."""
        known = self.measured_compiled()
        planner = replace(self, limits=self.limits_beside(known.by_torch or known))
        return planner.best_compiled(known, planner.others(known))

    def others(self, known: CompiledKnown) -> Iterator[Iterable[CompiledKnown]]:
        """Yield what else may be planned: the step by ways that change it as a whole, then with codes in host memory,
        then what computes more again."""
        changed = self.by_ways(known)
        if changed is not None:
            yield [one for one in (changed.by_torch, changed) if one is not None]
        if self.host_memory is not None:
            with self.changed(() if changed is None else changed.changes):
                hosted = know_hosted(self.step, changed or known, self.host_memory)
            yield [] if hosted is None else [hosted]
        if self.recompute:
            with self.changed(() if changed is None else changed.changes):
                found = list(other_ways(self.step, changed or known))
            yield found

    def by_ways(self, known: CompiledKnown) -> CompiledKnown | None:
        """Compile and measure the step by the ways that compiled graphs take, too; None if they save nothing."""
        before = Known(trace(self.step), (), {}, Measured(self.step))
        ways = [way for way in self.ways_of_steps if way.in_graphs]
        targets_of, changes = targets_by_way(ways, before, self.step)
        if not targets_of:
            return None
        log.info("compiling the step %s", ", ".join(way.method for way in targets_of))
        try:
            with self.changed(changes):
                after, found = trace(self.step), know_compiled(self.step)
        except Exception:  # as where something reads logits that have no memory, or a graph then saves nothing
            return None
        if int(found.base.max()) >= int(known.base.max()):
            return None
        choices = tuple(
            choice
            for way, names in targets_of.items()
            for choice in way.choices(self.step.model, names, before.trace, after, 0.0)
        )
        longer = {"seconds": known.seconds, "recompute_seconds": found.seconds - known.seconds, "changes": choices}
        by_torch = None if found.by_torch is None else replace(found.by_torch, **longer)
        return replace(found, by_torch=by_torch, **longer)

    def best_compiled(self, known: CompiledKnown, others: Iterable[Iterable[CompiledKnown]]) -> Plan:
        """Return the best plan for a compiled step, by what was measured when it was compiled.

        Torch's own compiler is a candidate too: what fits exactly needs no codes. Of the candidates the one that is
        predicted to be best is compiled first, and is the plan if what is measured of it is still the best. Each of
        `others` has another graph to measure, so they are tried only if the best so far costs more than a step that is
        longer by `WORTH`.

        Args:
            known: the step, which computes again what Inductor does by default.
            others: measure the step by further ways, the cheapest to train by first.

        Raises:
            FewbitError: no plan is within the limits, or none holds.
        """
        alone = replace(self, frontier=0)
        candidates: list[tuple[float, int, CompiledKnown, Plan | None]] = []  # with a plan if it is measured
        order = itertools.count()
        refusals: list[FewbitError] = []
        broken: FewbitError | None = None  # by what was measured of a plan

        def consider(one: CompiledKnown) -> None:
            try:
                plan = alone.solved(one)
            except FewbitError as error:
                refusals.append(error)
            else:
                heappush(candidates, (alone.cost(plan), next(order), one, plan if one.is_exact else None))

        for one in (known.by_torch, known):
            if one is not None:
                consider(one)
        good_enough = 0.0 if self.limits.memory is None else self.price.time * WORTH
        waiting: Iterator[Iterable[CompiledKnown]] = iter(others)
        are_left = True
        while candidates or are_left:
            if candidates:
                cost, _, one, plan = heappop(candidates)
                if plan is None:
                    try:
                        plan = alone.verified(one)
                        heappush(candidates, (alone.cost(plan), next(order), one, plan))
                    except FewbitError as error:
                        broken = error
                    continue
                if not are_left or cost <= good_enough:
                    return self.beside_torch(plan, known)
                heappush(candidates, (cost, next(order), one, plan))
            more = next(waiting, None)
            are_left = more is not None
            for one in more or ():
                consider(one)
        raise broken or nearest_refusal(refusals)

    def beside_torch(self, plan: Plan, known: CompiledKnown) -> Plan:
        """Return a plan with what a step takes that torch alone compiles, and the frontier if it is asked for."""
        exact = known.by_torch or known
        saved = {value.place: value.exact_bytes for value in exact.values}.get(ALL_GRAPHS)
        choices = tuple(
            replace(choice, exact_bytes=saved) if saved is not None and choice.target == ALL_GRAPHS else choice
            for choice in plan.choices
        )
        points = (*self.plan_points(known), *self.other_points(known)) if self.frontier else ()
        return replace(plan, choices=choices, exact_peak=self.problem(exact).exact_peak(), frontier=points)

    def verified(self, known: CompiledKnown) -> Plan:
        """Return a plan that was compiled, whose peak and time are the measured ones.

        The compiler orders and fuses by what is saved, so that a step may take more than was predicted from another
        one. What it takes too much, the next attempt is given less. Times scatter: one that is longer than it may be
        by less than `WORTH` is let pass.

        Raises:
            FewbitError: no attempt stays within the memory and the time.
        """
        given, refused = self.limits, ""
        least = 0
        for _ in range(ATTEMPTS):
            found = self.as_measured(self.solved(known, given), known)
            memory, time = self.limits.memory, self.limits.time
            if memory is not None and found.peak.total > memory:
                assert given.memory is not None
                takes = size_like(found.peak.total, memory, exactly=True)
                refused = f"{size_like(memory, memory)}: one that should have takes {takes}"
                least = least or replace(self, frontier=0).solved(known, Limits(time=1e6)).peak.total
                if given.memory <= least:
                    break
                least_step = (memory - self.of_rank.fixed) // 100
                less = max(found.peak.total - memory, least_step)
                given = replace(given, memory=max(least, given.memory - less))
            elif time is not None and found.time > time + WORTH:
                assert given.time is not None
                refused = f"time={time}: one that should have takes {found.time:.3f}"
                given = replace(given, time=given.time - (found.time - time))
            else:
                return found
        raise NoPlanError(f"no compiled plan stays within {refused}")

    def as_measured(self, plan: Plan, known: CompiledKnown) -> Plan:
        """Return a plan for a compiled step with the peak and the time of a step that is compiled by it."""
        log.info("compiling the step by a plan")
        with self.changed(known.changes):
            run = compile_step(self.step, **plan.compile_options)
        gradients = self.parallel.gradients(known.gradients)
        copies = int(gradients[0] - known.gradients[0])
        peak = self.of_rank.fixed + max(run.record.peak + copies, int(gradients[-1]) + self.of_rank.update)
        workspace = plan.peak.workspace + peak - plan.peak.total
        longer = run.seconds - known.seconds - sum(choice.seconds for choice in plan.choices)
        return replace(plan, peak=replace(plan.peak, workspace=workspace), recompute_seconds=longer)

    def measured_compiled(self) -> CompiledKnown:
        """Compile and measure the step."""
        if self.step.is_abstract:
            raise FewbitError("a compiled step is planned on real tensors, not on the meta device")
        log.info("compiling a step to measure it")
        return know_compiled(self.step)
