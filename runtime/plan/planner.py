"""`fewbit.plan` finds the best training that fits; `fewbit.fit` trains by it.

    plan = fewbit.plan(model, batch, memory="16GiB")      measures, solves, predicts
    fewbit.fit(model, plan=plan)                          carries it out
    fewbit.fit(model, batch, memory="16GiB")              both

1  trace     a step that saves nothing: memory at each moment, and the life of each saved tensor (trace.py)
2  measure   what each way to save does to the gradient (ways/, trial.py), and what it takes of time (seconds.py)
3  solve     one option for each tensor, within the memory at every moment (known.py, problem.py, solver.py)
4  once more by ways that change the whole step, where that plan is not exact (ways/): the loss in chunks, MLPs in tiles
5  carry out tables, recomputed blocks and hooks (fitted.py)
"""

import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_names
from ...tables.sizes import parse_size, size_like
from ..convert.measure import read_inputs
from ..memory.listing import size_text
from ..memory.storages import parts_of
from ..tensors.checks import check_integer
from .compiled import CompiledKnown, budget_runs, compile_step, know_compiled, other_ways
from .document import Choice, PeakMemory, Plan, Point, signature
from .fitted import Fitted, unfitted
from .frontier import points_of, timeline_of
from .guard import EVERY, guard_fit
from .known import Known, WayToSave
from .parallel import Alone, Parallel, Shards, Static, parallel_of
from .problem import ALL_GRAPHS, AND, EXACT, RECOMPUTE, Limits, Option, Price, Problem, Solution
from .search import largest_by_trial
from .seconds import Measured, Roofline, Scaled, Speeds, device_of
from .solver import Effort, TooLittleMemoryError, is_feasible, merge, solve, split
from .step import Loss, Step
from .structure import structure_aside
from .trace import Trace, scaled, trace
from .trial import Trial
from .ways import WAYS, WAYS_TO_SAVE
from .ways.tensors import errors_by_shape
from .ways.way import carry_out, choices_of_batch, known_by

# Options that the solver is given at once. Of more, those of runs of equal layers are merged, to about so many: a
# problem of 1,500 takes some seconds, one of 300 a second, and its plans' price is about 2 % higher.
MOST_OPTIONS, MERGED_OPTIONS = 1500, 300
_log = logging.getLogger("fewbit.plan")  # says at level INFO what is done, since that takes up to minutes
# Modules of torch whose classes wrap a model for several processes or devices.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")
WORTH = 0.03  # of a step's time
BUDGETS = (1.0, 0.5, 0.0)  # of torch's, in pictures
_NOTED = Effort(gap=1e-2)  # for what more memory would bring, which is not carried out
MOST_SAMPLES = 1 << 24  # above which a step is said not to grow with its batch
ATTEMPTS = 6  # at a compiled plan, of which each is compiled
# Copies of the trained parameters in an optimizer's state.
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adam", "nadam", "radam", "adamax"), 2.0),
    **dict.fromkeys(("momentum", "lion", "rmsprop", "adagrad"), 1.0),
    **dict.fromkeys(("adamw8bit", "adam8bit"), 0.5),
    "sgd": 0.0,
}


def plan(
    model: nn.Module,
    *inputs: Any,
    loss: Loss | None = None,
    memory: str | float | None = None,
    error: float | None = None,
    time: float | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    batch: str | None = None,
    gpu: str | None = None,
    price: Price | None = None,
    recompute: bool = True,
    compiled: bool = False,
    parallel: str | None = None,
    frontier: int = 0,
) -> Plan:
    """Find the training of a model that fits into a memory at the least error and time.

    Each saved tensor is saved exactly, in codes of 1 to 8 bits, in host memory (on a GPU), or not at all, because its
    activation saves codes of a table or its block is recomputed; where exact training does not fit, the loss of a
    language model may be computed in chunks of tokens, exactly, so that no logits are saved, and MLPs in tiles of
    tokens. The model runs a few training steps, and is left as it was. On the meta device nothing runs: errors are then
    estimated from shapes, and times from the data sheet of `gpu`.

    Of several processes each plans, and all take the plan of the first; its memory is that of one rank. Plan before the
    model is wrapped or sharded, and say by `parallel` that it will be.

    Args:
        model: in the mode in which it trains. Within `torch.autocast`, plan within it too.
        *inputs: a batch: arguments of the model, or one mapping of its keywords.
        loss: function of the model's output that returns one number; by default the output named `loss`, or the output
            itself.
        memory: most bytes at the peak of a step, with parameters, gradients and the optimizer's state: "16GiB".
        error: largest relative error of the gradient, such as 0.05.
        time: longest step relative to the exact one, such as 1.05. Without `memory`, the least memory is sought.
        optimizer: its name (`OPTIMIZERS`), with "-fused" if its step takes no memory of its own; or the optimizer.
        batch: "max" finds the largest batch that fits, of samples such as the given ones.
        gpu: name of the GPU (`DEVICES`) for which times are estimated; default on the meta device is "a100".
        price: weights of error and time, by which plans within the limits are compared.
        recompute: whether blocks may be recomputed, and MLPs computed in tiles, whose forward pass runs twice.
        compiled: plan for `torch.compile` with the backend fewbit. The step is compiled to measure it, which takes its
            time; what is computed again is then the compiler's choice, by torch's `activation_memory_budget`.
        parallel: "ddp" counts the buckets of `DistributedDataParallel`; "fsdp:8" the shards of FSDP2 on 8 ranks, with a
            unit each block, and what is gathered at once: twice the largest unit and what belongs to none.
        frontier: number of further memories, from the least to that of exact training, for which plans are made to
            compare, with other ways to train; `fewbit plan --plot` draws them.

    Raises:
        FewbitError: nothing is limited, no plan is within the limits, an argument is wrong, or the output is no loss.

    Example:
        plan = fewbit.plan(model, {"input_ids": ids, "labels": ids}, memory="16GiB")
    """
    limits = Limits(None if memory is None else parse_size(memory), _positive("error", error), _time(time))
    if limits == Limits():
        raise FewbitError("give memory=, such as '16GiB', or error= or time=")
    if batch not in (None, "max"):
        raise FewbitError(f"batch is None or 'max', not {shown(batch)}")
    if batch == "max" and limits.memory is None:
        raise FewbitError("batch='max' needs memory=")
    if compiled and parallel not in (None, "ddp"):
        raise FewbitError("a sharded step is planned as it runs eagerly: leave out compiled=True")
    if compiled and gpu is not None:
        raise FewbitError("a compiled step is measured where it runs: leave out gpu= or compiled=True")
    if batch == "max" and compiled:
        raise FewbitError("batch='max' plans steps that are not compiled")
    if price is not None and not isinstance(price, Price):
        raise FewbitError(f"price is a Price, weights of error and time, not {shown(price)}")
    check_whole(model)
    args, keywords = read_inputs(inputs[0]) if len(inputs) == 1 else (inputs, {})
    step = Step(model, args, keywords, loss)
    with unfitted(model), structure_aside(model):
        planner = Planner(
            *(step, limits, price or Price(), static_bytes(model, optimizer), gpu, recompute, compiled, frontier),
            parallel_of(parallel, model),
        )
        return _agreed(planner.largest() if batch == "max" else planner.plan())


def check_whole(model: nn.Module) -> None:
    """Raise FewbitError if a model is none, sharded, or wrapped for several processes: it cannot be measured."""
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    wrapper = type(model).__name__ if type(model).__module__.startswith(_WRAPPERS) else None
    if wrapper is None and any(type(p).__name__ == "DTensor" for p in model.parameters()):
        wrapper = "fully_shard"
    if wrapper is not None:
        raise FewbitError(f"plan before {wrapper}, which changes what can be measured, and say parallel=")


def _agreed(found: Plan) -> Plan:
    """Return the plan of the first rank, so that all ranks save the same; their batches tell them different errors."""
    if not (dist.is_available() and dist.is_initialized()):
        return found
    plans = [found]
    dist.broadcast_object_list(plans, src=0)
    return plans[0]


_plan = plan  # `fit` has an argument of that name


def fit(model: nn.Module, *inputs: Any, plan: Plan | None = None, guard: bool | int = False, **limits: Any) -> Fitted:
    """Train a model by a plan: from now on, each of its forward passes saves what the plan says.

    Args:
        model: changed in place; `fitted.undo()` or `fewbit.revert(model)` puts it back. Forward passes stay the same,
            but for the order in which a loss in chunks is summed.
        *inputs: a batch, to plan for, as for `fewbit.plan`.
        plan: a plan for this model; then no inputs are given, and of the arguments of `fewbit.plan` only those that
            `fitted.refresh` needs: loss, optimizer and parallel.
        guard: True, or a number of steps N: one step in N, of 100 by default, is measured exactly, a few layers each
            time.
            Where the relative error of a layer's gradient times √3 exceeds 1, is not finite, or has grown by a factor
            of 4 since the plan, bits move within the memory, and if that is too little the layer is exact from then
            on.
            `fitted.guard` is a `Guard`, with `state_dict` for checkpoints.
        **limits: arguments of `fewbit.plan`.

    Returns:
        The model with its plan; `print` shows the plan, and `refresh` makes it follow the training.

    Raises:
        FewbitError: the plan is for another model, or as for `fewbit.plan`.

    Example:
        fitted = fewbit.fit(model, batch, memory="16GiB")
    """
    if plan is not None and not isinstance(plan, Plan):
        raise FewbitError(f"plan is a Plan, of fewbit.plan or Plan.from_json, not {shown(plan)}")
    if plan is not None and (inputs or set(limits) - {"loss", "optimizer", "parallel"}):
        raise FewbitError("give a plan, or a batch and limits to make one")
    loss, optimizer, price = limits.get("loss"), limits.get("optimizer", "adamw"), limits.get("price") or Price()
    if guard is not True and guard is not False:
        check_integer("guard", guard, 1)
    of_output = None if loss is None else _Loss(loss)
    again = partial(_again, of_output, optimizer, price, limits.get("parallel"))
    fitted = Fitted(model, _plan(model, *inputs, **limits) if plan is None else plan, again)
    if guard is not False:
        fitted.guard = guard_fit(fitted, of_output, EVERY if guard is True else guard)
    return fitted


@dataclass(frozen=True)
class _Loss:
    """A loss. A pickle of the model does without it if it is a function that cannot be pickled, such as a lambda."""

    function: Loss

    def __call__(self, output: Any) -> Tensor:
        return self.function(output)

    def __deepcopy__(self, _: Any) -> "_Loss":
        return self

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return {"function": _without_loss}
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _without_loss(_: Any) -> Tensor:
    raise FewbitError("the loss could not be saved with the model: give it again, fewbit.fit(model, plan=…, loss=…)")


def _again(
    loss: Loss | None,
    optimizer: str | torch.optim.Optimizer,
    price: Price,
    parallel: str | None,
    model: nn.Module,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    before: Plan,
) -> Plan:
    """Return the plan for another batch, and the memory of the plan before."""
    check_whole(model)
    kind = parallel_of(parallel, model)
    if isinstance(kind, Shards):
        raise FewbitError("a model that will be sharded is planned once, before")
    step, limits = Step(model, args, keywords, loss), Limits(**before.limits)  # pyright: ignore[reportArgumentType]
    if step.samples < before.batch:
        step = step.with_samples(before.batch)
    recompute = before.recompute < 1 or any(choice.method == RECOMPUTE for choice in before.choices)
    static = static_bytes(model, optimizer)
    with structure_aside(model):
        return _agreed(Planner(step, limits, price, static, None, recompute, before.compiled, parallel=kind).plan())


# ---- memory that is there throughout ---------------------------------------------------------------------------------


def static_bytes(model: nn.Module, optimizer: str | torch.optim.Optimizer) -> Static:
    """Return the memory of parameters and optimizer: of this rank's shards where they are sharded.

    Raises:
        FewbitError: the optimizer's name is not known.
    """
    trained = [_bytes(p) for p in model.parameters() if p.requires_grad]
    held = sum({id(t): _bytes(t) for t in (*model.parameters(), *model.buffers())}.values())
    is_fused = False
    # As torch chooses: one parameter after another on the CPU, all of them at once on a GPU ("foreach").
    one_by_one = all(p.device.type == "cpu" for p in model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        group = optimizer.param_groups[0]
        is_fused = bool(group.get("fused"))
        one_by_one = one_by_one or group.get("foreach") is False
        name = "momentum" if group.get("momentum") else type(optimizer).__name__
    else:
        name = optimizer
    update = 0 if is_fused else 2 * max(trained, default=0) if one_by_one else sum(trained)
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        tensors = [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]
        return Static(held, sum(map(_bytes, tensors)), update)
    if not isinstance(name, str) or name.lower().removesuffix("-fused") not in OPTIMIZERS:
        near = nearest_names(name, [*OPTIMIZERS]) if isinstance(name, str) else []
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise FewbitError(f"{shown(name)} is no optimizer that fewbit knows: {', '.join(OPTIMIZERS)}{hint}")
    copies = OPTIMIZERS[name.lower().removesuffix("-fused")]
    update = update if copies and not name.lower().endswith("-fused") else 0
    return Static(held, int(copies * sum(trained)), update)


def _bytes(x: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts_of(x))


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not value > 0):
        raise FewbitError(f"{name} is a number above 0, not {shown(value)}")
    return None if value is None else float(value)


def _time(value: float | None) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not value >= 1):
        raise FewbitError(f"time is a number of at least 1, the time of an exact step, not {shown(value)}")
    return None if value is None else float(value)


# ---- planning --------------------------------------------------------------------------------------------------------


@dataclass
class Planner:
    """One call of `plan`.

    Attributes:
        step: model, batch, loss.
        limits, price, gpu, recompute, compiled, frontier: as for `plan`.
        static: memory of parameters and optimizer, of a process without others.
        parallel: kind of data parallelism.
        speeds: in place of those that are measured or estimated.
    """

    step: Step
    limits: Limits
    price: Price
    static: Static
    gpu: str | None
    recompute: bool
    compiled: bool
    frontier: int = 0
    parallel: Parallel = field(default_factory=Alone)
    speeds: Speeds | None = None

    def plan(self) -> Plan:
        """Return the plan for the step's batch."""
        return self.compiled_plan() if self.compiled else self.best_eager(self.measured_eagerly())

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
        refused: FewbitError | None = None
        for known in self.eager_ways(plain):
            least = min((self.cost(plan) for plan, _ in found), default=math.inf)
            if self.limits.memory is not None and self.price.time * known.taken >= least:
                continue  # its time alone costs more
            try:
                found.append((self.solved(known), known))
            except FewbitError as error:
                refused = error
            else:
                if self.cost(found[-1][0]) <= 0:
                    break
        if not found:
            assert refused is not None
            raise refused
        plan, known = min(found, key=lambda each: self.cost(each[0]))
        return self.beside_exact(plan, known, plain)

    def least(self) -> Plan:
        """Return the plan of a step by all the ways: none takes less memory, so that alone is solved."""
        plain = self.measured_eagerly()
        *_, known = self.eager_ways(plain)
        return self.beside_exact(self.solved(known), known, plain)

    def eager_ways(self, plain: Known) -> Iterator[Known]:
        """Yield a step as it is, and then, where that is asked for, by one way more each time."""
        yield (known := plain)
        for way in (way for way in WAYS if self.recompute or not way.computes_again):
            _log.info("tracing the step %s", way.method)
            changed = partial(self.changed, known.changes)
            if (other := known_by(way, known, self.step, changed)) is not None:
                yield (known := other)

    @contextmanager
    def changed(self, changes: Sequence[Choice]) -> Iterator[None]:
        """Change the model by choices of ways within this block."""
        with structure_aside(self.step.model):
            carry_out(WAYS, self.step.model, changes)
            yield

    def beside_exact(self, plan: Plan, known: Known, plain: Known) -> Plan:
        """Return a plan with the peak of the step as it is, and the frontier if it is asked for: plans for the step of
        this plan, beside other ways to train the step as it is."""
        exact = _exact_peak(self.problem(plain))
        if not self.frontier:
            return replace(plan, exact_peak=exact)
        points = []
        for one in (known,) if known is plain else (known, plain):
            problem = self.problem(one)
            of_plans = [(p.name == "plan", p) for p in self.points(one, problem, _merged(problem, one))]
            points += [replace(p, time=p.time + one.taken) for is_plan, p in of_plans if is_plan and one is known]
            points += [p for is_plan, p in of_plans if not is_plan and one is plain]
        return replace(plan, exact_peak=exact, frontier=tuple(points))

    def compiled_plan(self) -> Plan:
        """Return a plan for a compiled step, which is measured."""
        known = self.measured_compiled()
        return self.best_compiled(known, partial(other_ways, self.step, known))

    def best_compiled(self, known: CompiledKnown, others: Callable[[], Iterable[CompiledKnown]]) -> Plan:
        """Return the best plan for a compiled step, by what was measured when it was compiled.

        Torch's own compiler is a candidate too: what fits exactly needs no codes. Of the candidates the one that is
        predicted to be best is compiled first, and is the plan if what is measured of it is still the best. `others`
        compute more again, each by another graph to measure, so they are tried only if the best so far costs more than
        a step that is longer by `WORTH`.

        Args:
            known: the step, which computes again what Inductor does by default.
            others: measures the step with torch's budgets.

        Raises:
            FewbitError: no plan is within the limits, or none holds.
        """
        alone = replace(self, frontier=0)
        candidates: list[tuple[float, int, CompiledKnown, Plan | None]] = []  # with a plan if it is measured
        order = itertools.count()
        refused: FewbitError | None = None

        def consider(one: CompiledKnown) -> None:
            nonlocal refused
            try:
                plan = alone.solved(one)
            except FewbitError as error:
                refused = refused or error
            else:
                heappush(candidates, (alone.cost(plan), next(order), one, plan if one.is_exact else None))

        for one in (known.by_torch, known):
            if one is not None:
                consider(one)
        all_known = not self.recompute
        while candidates or not all_known:
            if candidates:
                cost, _, one, plan = heappop(candidates)
                if plan is None:
                    try:
                        plan = alone.verified(one)
                        heappush(candidates, (alone.cost(plan), next(order), one, plan))
                    except FewbitError as error:
                        refused = error
                    continue
                if all_known or cost <= self.cost_of_time:
                    return self.beside_torch(plan, known)
                heappush(candidates, (cost, next(order), one, plan))
            all_known = True
            for one in others():
                consider(one)
        assert refused is not None
        raise refused

    def beside_torch(self, plan: Plan, known: CompiledKnown) -> Plan:
        """Return a plan with what a step takes that torch alone compiles, and the frontier if it is asked for."""
        exact = known.by_torch or known
        saved = {value.place: value.exact_bytes for value in exact.values}.get(ALL_GRAPHS)
        choices = tuple(
            replace(choice, exact_bytes=saved) if saved is not None and choice.target == ALL_GRAPHS else choice
            for choice in plan.choices
        )
        problem = self.problem(known)
        points = self.points(known, problem, _merged(problem, known)) if self.frontier else ()
        return replace(plan, choices=choices, exact_peak=_exact_peak(self.problem(exact)), frontier=points)

    def cost(self, plan: Plan) -> float:
        """Return what plans are compared by: their price, or the memory where that is sought."""
        if self.limits.memory is None:
            return plan.peak.total
        noise, bias = plan.error**2 - plan.bias**2, plan.bias**2
        return self.price.noise * noise + self.price.bias * bias + self.price.time * (plan.time - 1)

    @property
    def cost_of_time(self) -> float:
        """The cost above which plans that compute more again are sought."""
        return 0.0 if self.limits.memory is None else self.price.time * WORTH

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
        raise FewbitError(f"no compiled plan stays within {refused}")

    def as_measured(self, plan: Plan, known: CompiledKnown) -> Plan:
        """Return a plan for a compiled step with the peak and the time of a step that is compiled by it."""
        _log.info("compiling the step by a plan")
        run = compile_step(self.step, **plan.compile_options)
        gradients = self.gradients(known)
        copies = int(gradients[0] - known.gradients[0])
        peak = self.of_rank.fixed + max(run.record.peak + copies, int(gradients[-1]) + self.of_rank.update)
        workspace = plan.peak.workspace + peak - plan.peak.total
        longer = run.seconds - known.seconds - sum(choice.seconds for choice in plan.choices)
        return replace(plan, peak=replace(plan.peak, workspace=workspace), recompute_seconds=longer)

    def measured_compiled(self) -> CompiledKnown:
        """Compile and measure the step."""
        if self.is_abstract:
            raise FewbitError("a compiled step is planned on real tensors, not on the meta device")
        _log.info("compiling a step to measure it")
        return know_compiled(self.step)

    def measured_eagerly(self) -> Known:
        """Trace and measure a step that is not compiled."""
        step = self.step
        _log.info("tracing a step")
        traced = trace(step)
        _log.info("timing the quantizers")
        speeds = self.speeds or self._speeds()
        if self.is_abstract:
            of_tensors = errors_by_shape(traced)
            errors = {m: e for way in self.ways for m, e in way.estimate(step, traced, of_tensors).items()}
            return Known(traced, self.ways, errors, speeds)
        _log.info("measuring what rounding does to the gradient")
        part, errors = step.part(), {}
        with part.step.apart():
            trial = Trial(part.step)
            for way in self.ways:
                for method, found in way.measure(step, traced, trial).items():
                    errors[method] = {name: each.times(part.noise, part.bias) for name, each in found.items()}
        return Known(traced, self.ways, errors, speeds)

    @property
    def ways(self) -> tuple[WayToSave, ...]:
        """The ways that a plan may take."""
        return tuple(way for way in WAYS_TO_SAVE if self.recompute or RECOMPUTE not in way.methods)

    def _speeds(self) -> Speeds:
        if self.is_abstract or self.gpu is not None:
            return Roofline(self.step, device_of(self.gpu or "a100"))
        return Measured(self.step)

    @property
    def is_abstract(self) -> bool:
        """Whether the model or the batch has no values."""
        return self.step.is_abstract

    def solved(self, known: Known | CompiledKnown, limits: Limits | None = None) -> Plan:
        """Return the plan for what was measured."""
        problem = self.problem(known)
        merged = _merged(problem, known)
        _log.info("solving")
        try:
            solution = solve(merged, self.within(known, limits or self.limits), self.price)
        except TooLittleMemoryError as error:
            least = split(error.least, problem.options) if merged is not problem else error.least
            raise FewbitError(f"{error}, {self.refusal(self.document(known, problem, least, []))}") from None
        if merged is not problem:
            solution = split(solution, problem.options)
        return self.document(known, problem, solution, self.notes(known, problem, merged, solution))

    def refusal(self, least: Plan) -> str:
        """Return what the plan of least memory takes it for, and what else may be tried, on the line of an error."""
        peak = least.peak
        parts = {name: getattr(peak, name) for name in ("parameters", "gradients", "optimizer", "saved", "workspace")}
        made_of = ", ".join(f"{name} {size_like(size, peak.total)}" for name, size in parts.items() if size)
        tries = [
            ("a smaller batch", self.step.samples > 1),
            ("another optimizer, such as adamw8bit or sgd", peak.optimizer > peak.total // 10),
            ("recompute", not self.recompute),
            ("more error or time", self.limits.error is not None or self.limits.time is not None),
            ("shards, parallel fsdp:8", peak.parameters + peak.optimizer > peak.total // 4 and not self.compiled),
            ("fewer trained parameters, as of LoRA", peak.gradients + peak.optimizer > peak.total // 4),
        ]
        words = "; ".join(name for name, helps in tries if helps) or "a smaller model or batch"
        return f"{peak.moment}: {made_of}; try {words}"

    def points(self, known: Known | CompiledKnown, problem: Problem, merged: Problem) -> tuple[Point, ...]:
        """Return what plans for other memories, and other ways to train, take."""
        points = points_of(problem, merged, known.uniform, self.frontier, self.price)
        return *points, *self.budget_points(known)

    def budget_points(self, known: Known | CompiledKnown) -> Iterator[Point]:
        """Yield what torch's compiler takes with its memory budgets, relative to the exact step of the plan."""
        if self.is_abstract or self.step.device.type == "meta":
            return
        exact = known.seconds if isinstance(known, CompiledKnown) else known.speeds.step
        for ratio, record, seconds in budget_runs(self.step, BUDGETS):
            name = "torch.compile" if ratio == 1 else f"torch's budget {ratio:g}"
            yield Point(name, self.of_rank.fixed + record.peak, 0.0, seconds / exact)

    def within(self, known: Known | CompiledKnown, limits: Limits) -> Limits:
        """Return the limits of what is still to be chosen: what the step computes again has taken some of the time.

        Raises:
            FewbitError: it has taken more than there is.
        """
        if limits.time is None or not known.taken:
            return limits
        if limits.time < 1 + known.taken:
            raise FewbitError(f"no plan is within time={limits.time}")
        return replace(limits, time=limits.time - known.taken)

    def problem(self, known: Known | CompiledKnown) -> Problem:
        """Return the problem, whose last moment is the optimizer's step."""
        problem = known.problem(self.step, self.of_rank.fixed)
        gradients = self.gradients(known)
        base = problem.base - known.gradients + gradients
        base += self.parallel.workspace(len(base), known.backward)
        return replace(problem, base=np.append(base, int(gradients[-1]) + self.of_rank.update))

    @property
    def of_rank(self) -> Static:
        """Memory of parameters and optimizer of one rank."""
        return self.parallel.static(self.static)

    def gradients(self, known: Known | CompiledKnown) -> NDArray[np.int64]:
        """Return the bytes of the parameters' gradients on one rank at each moment."""
        return self.parallel.gradients(known.gradients)

    def document(self, known: Known | CompiledKnown, problem: Problem, solution: Solution, notes: list[str]) -> Plan:
        """Return the plan that a solution stands for."""
        exact = [o for o in problem.options if o.method == EXACT]
        exact_bytes = {o.covers[0]: o.saved for o in exact}
        order = sorted(solution.chosen, key=lambda o: o.covers[0])
        changes = known.changes if isinstance(known, Known) else ()
        choices = [*changes, *(choice for o in order for choice in _choices(o, exact_bytes))]
        usage = problem.usage(solution.chosen)
        at = int(np.argmax(usage))
        gradients = self.gradients(known)
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
            _exact_peak(problem),
            *(solution.error, solution.bias**0.5, problem.seconds, solution.gap),
            {"memory": self.limits.memory, "error": self.limits.error, "time": self.limits.time},
            self.step.samples,
            self.compiled,
            timeline_of(problem, solution.chosen, exact, gradients, known.backward),
            tuple(notes),
            (),
            *((known.recompute, known.recompute_seconds) if isinstance(known, CompiledKnown) else ()),
        )

    def notes(self, known: Known | CompiledKnown, problem: Problem, merged: Problem, solution: Solution) -> list[str]:
        """Return what was estimated, and what more memory would bring."""
        notes = []
        if len(merged.options) < len(problem.options):
            notes.append("this bound is of plans that treat equal layers alike, in runs of several")
        if self.is_abstract:
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

    # ---- the largest batch -------------------------------------------------------------------------------------------

    def largest(self) -> Plan:
        """Return the plan for the largest batch that fits.

        Where memory grows evenly with the batch, traces of the batch and of twice the batch tell it for any other, and
        the search begins at the one that they tell; that of a contrastive loss grows with its square, so every batch
        that is tried is traced itself. Errors are taken as those of the given batch.
        """
        samples, plain = self.step.samples, self.measured_eagerly()
        *_, known = self.eager_ways(plain)  # what saves most
        known_of = {samples: known}

        def traced(count: int) -> Known:
            if count not in known_of:
                speeds = Scaled(known.speeds, count / samples)
                known_of[count] = replace(known, trace=self._trace_of(count, known.changes), speeds=speeds)
            return known_of[count]

        def planned(count: int) -> Plan:
            alone = replace(self, step=self.step.with_samples(count))
            if not known.changes:
                return alone.beside_exact(alone.solved(traced(count)), traced(count), traced(count))
            exactly = replace(plain, trace=self._trace_of(count, ()), speeds=Scaled(plain.speeds, count / samples))
            own = choices_of_batch(WAYS, self.step.model, known.changes, exactly.trace, traced(count).trace)
            found = replace(traced(count), changes=tuple(own))
            return alone.beside_exact(alone.solved(found), found, exactly)

        def fits(count: int) -> bool:
            return self.is_feasible(traced(count))

        guess = samples
        if fits(samples) and fits(2 * samples):
            guess = self._expected(known, traced(2 * samples).trace, samples)
        tolerance = 0.01 if guess >= 100 else 0.0
        most = largest_by_trial(fits, guess, tolerance)
        if not most:
            try:
                return planned(1)
            except FewbitError as error:
                raise FewbitError(f"not even one sample fits: {error}") from None
        return planned(most)

    def _trace_of(self, count: int, changes: Sequence[Choice]) -> Trace:
        """Return the trace of another number of samples, of the model changed by choices of ways."""
        try:
            with self.changed(changes):
                return trace(self.step.with_samples(count))
        except FewbitError:
            raise
        except Exception as error:  # a tensor that has as many rows as there are samples, and is not of samples
            raise FewbitError(
                f"batch='max' takes tensors of {self.step.samples} rows for a row a sample, and with {count} the model "
                f"raises {type(error).__name__}: {' '.join(str(error).split()):.200}"
            ) from error

    def _expected(self, known: Known, double: Trace, samples: int) -> int:
        """Return the batch that should be the largest, if memory grows evenly; a larger one that fits if it does not.

        Args:
            known: of a batch that fits.
            double: the trace of twice the batch, which fits too.
            samples: in the batch.
        """

        def scaled_to(count: int) -> Known:
            factor = count / samples
            return replace(known, trace=scaled(known.trace, double, factor), speeds=Scaled(known.speeds, factor))

        try:
            expected = scaled_to(4 * samples).trace.base.max()
        except FewbitError:  # the two steps allocate in another order
            return 2 * samples
        fourfold = self._trace_of(4 * samples, known.changes).base.max()
        if abs(int(expected) - int(fourfold)) > 0.01 * fourfold:
            return 2 * samples

        def fits(count: int) -> bool:
            if count > MOST_SAMPLES:
                raise FewbitError("any batch fits: the memory of a step does not grow with it")
            return self.is_feasible(scaled_to(count))

        return max(2 * samples, largest_by_trial(fits, 2 * samples))

    def is_feasible(self, known: Known) -> bool:
        """Return whether there is a plan within the limits."""
        problem = _merged(self.problem(known), known)
        return is_feasible(problem, self.limits)


def _exact_peak(problem: Problem) -> int:
    """Return the peak of a step that saves all exactly."""
    return problem.fixed + int(problem.usage(o for o in problem.options if o.method == EXACT).max())


def _merged(problem: Problem, known: Known | CompiledKnown) -> Problem:
    """Return what the solver is given."""
    return problem if len(problem.options) <= MOST_OPTIONS else merge(problem, known.kinds, MERGED_OPTIONS)


def _choices(option: Option, exact_bytes: Mapping[int, int]) -> Iterator[Choice]:
    """Yield the choice that an option stands for, and that of the tensor that it holds exactly besides."""
    target, _, besides = option.target.partition(AND)
    covered, of_besides = sum(exact_bytes[i] for i in option.covers), 0
    if besides:
        of_besides = exact_bytes[option.covers[-1]]
        yield Choice(besides, EXACT, None, of_besides, of_besides, 0.0, 0.0, 0.0)
    held = covered - of_besides, option.saved - of_besides
    yield Choice(target, option.method, option.bits, *held, option.noise, option.bias, option.seconds)
