"""`fewbit.plan` finds the best training that fits; `fewbit.fit` trains by it.

    plan = fewbit.plan(model, batch, memory="16GiB")      measures, solves, predicts
    fewbit.fit(model, plan=plan)                          carries it out
    fewbit.fit(model, batch, memory="16GiB")              both

eager_planner.py has the steps; compiled_planner.py those of a compiled step, largest_batch.py the search for a batch.
"""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...tables import FewbitError
from ...tables.compiling import announced_if_long
from ...tables.errors import check_integer, shown
from ...tables.sizes import parse_share, parse_size
from ...tables.waits import phases_of
from ..compile.host import check_torch
from ..convert.report import read_inputs
from ..memory.peak import no_collection
from .compiled_planner import CompiledPlanner
from .document import Plan
from .eager_planner import Planner
from .fitted import Fitted, unfitted
from .guard import EVERY, guard_fit
from .largest_batch import plan_largest
from .problem import RECOMPUTE, Limits, Price
from .static import is_sharded_by_fsdp, parallel_of, static_bytes
from .step import Loss, Step
from .structure import structure_aside

# Modules of torch whose classes wrap a model for several processes or devices.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")


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
    host_memory: str | float | None = None,
    parallel: str | None = None,
    frontier: int = 0,
) -> Plan:
    """Find the training of a model that fits into a memory at the least error and time.

    Each saved tensor is saved exactly, in codes of 1 to 8 bits, in host memory (on a GPU), or not at all, because its
    activation saves codes of a table or its block is recomputed; where exact training does not fit, the loss of a
    language model may be computed in chunks of tokens, exactly, so that no logits are saved, and MLPs in tiles of
    tokens. The model runs a few training steps, and is left as it was. On the meta device nothing runs: errors are then
    estimated from shapes, and times from the data sheet of `gpu`.

    Of several processes each plans, and all of the same model take the plan of the first; its memory is that of one
    rank. Plan before the model is wrapped or sharded, and say by `parallel` that it will be; a tensor-parallel model
    (`parallelize_module`) is planned as it is, on all ranks at once, its memory that of a rank.

    Args:
        model: in the mode in which it trains. Within `torch.autocast`, plan within it too.
        *inputs: a batch: arguments of the model, or one mapping of its keywords.
        loss: function of the model's output that returns one number; by default the output named `loss`, or the output
            itself.
        memory: most bytes at the peak of a step, with parameters, gradients and the optimizer's state: "16GiB"; or a
            share of what the exact step takes of them, "50%", of a compiled one that `torch.compile` alone takes.
        error: largest relative error of the gradient, such as 0.05.
        time: longest step relative to the exact one, such as 1.05. Without `memory`, the least memory is sought.
        optimizer: its name (`OPTIMIZERS`), with "-fused" if its step takes no memory of its own; or the optimizer.
        batch: "max" finds the largest batch that fits, of samples such as the given ones.
        gpu: name of the GPU (`DEVICES`) for which times are estimated; default on the meta device is "a100".
        price: weights of error and time, by which plans within the limits are compared.
        recompute: whether blocks may be recomputed, and MLPs computed in tiles, whose forward pass runs twice.
        compiled: plan for `torch.compile` with the backend fewbit. The step is compiled to measure it, which takes its
            time; what is computed again is then the compiler's choice, by torch's `activation_memory_budget`.
        host_memory: of a compiled step, most bytes of each graph's codes that may wait in host memory between the
            passes, as "8GiB", where that is worth the time of their copies, which is measured. Needs torch 2.13, and a
            GPU; by default none. Plans of steps that are not compiled weigh host memory by themselves.
        parallel: "ddp" counts the buckets of `DistributedDataParallel`; "fsdp:8" the shards of FSDP2 on 8 ranks, with a
            unit each block, and what is gathered at once: twice the largest unit and what belongs to none. "pipeline:4"
            counts what the stage of a pipeline saves for 4 microbatches in flight, of which the batch is one.
        frontier: number of further memories, from the least to that of exact training, for which plans are made to
            compare, with other ways to train; `fewbit plan --plot` draws them.

    Raises:
        FewbitError: nothing is limited, no plan is within the limits, an argument is wrong, or the output is no loss.

    Example:
        plan = fewbit.plan(model, {"input_ids": ids, "labels": ids}, memory="16GiB")
    """
    share = parse_share(memory)
    in_bytes = None if memory is None or share is not None else parse_size(memory)
    largest = _number(error, lambda value: value > 0, "error is a number above 0")
    longest = _number(time, lambda value: value >= 1, "time is a number of at least 1, the time of an exact step")
    limits = Limits(in_bytes, largest, longest)
    if limits == Limits() and share is None:
        raise FewbitError("give memory=, such as '16GiB', or error= or time=")
    if batch not in (None, "max"):
        raise FewbitError(f"batch is None or 'max', not {shown(batch)}")
    if batch == "max" and limits.memory is None:
        raise FewbitError("batch='max' needs memory= in bytes, such as '16GiB'")
    if compiled and parallel not in (None, "ddp"):
        raise FewbitError("a sharded or pipelined step is planned as it runs eagerly: leave out compiled=True")
    if compiled and gpu is not None:
        raise FewbitError("a compiled step is measured where it runs: leave out gpu= or compiled=True")
    if host_memory is not None and not compiled:
        raise FewbitError("host_memory= is for compiled=True: other plans weigh host memory by themselves")
    if batch == "max" and compiled:
        raise FewbitError("batch='max' plans steps that are not compiled")
    if price is not None and not isinstance(price, Price):
        raise FewbitError(f"price is a Price, weights of error and time, not {shown(price)}")
    check_whole(model)
    args, keywords = read_inputs(inputs[0]) if len(inputs) == 1 else (inputs, {})
    step = Step(model, args, keywords, loss)
    _check_parallel(step, {"compiled": compiled, "batch": batch, "parallel": parallel, "frontier": frontier})
    collects_none = no_collection(collect=False) if step.is_abstract else nullcontext()  # a fifth of the time
    with unfitted(model), structure_aside(model), collects_none, _announced():
        of_call = (step, limits, price or Price(), static_bytes(model, optimizer), gpu, recompute, frontier)
        waiting = None if host_memory is None else parse_size(host_memory)
        if waiting is not None:
            check_torch()
        kind = partial(CompiledPlanner, host_memory=waiting) if compiled else Planner
        planner = kind(*of_call, parallel_of(parallel, model), share=share)
        return _agreed(plan_largest(planner) if batch == "max" else planner.plan())


@contextmanager
def _announced() -> Iterator[None]:
    """Say what is done of a plan that takes long, where nobody hears the logger say it."""
    if logging.getLogger("fewbit.plan").isEnabledFor(logging.INFO):  # by a command, a callback, or a program's own wish
        yield
        return
    with phases_of("fewbit.plan", "planning") as phase, announced_if_long(lambda: f"fewbit: {phase()}"):
        yield


def check_whole(model: nn.Module) -> None:
    """Raise FewbitError if a model is none, sharded by FSDP2, or wrapped for several processes: none is measured."""
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    wrapper = type(model).__name__ if type(model).__module__.startswith(_WRAPPERS) else None
    if any(is_sharded_by_fsdp(module) for module in model.modules()):
        wrapper = "fully_shard"  # whose units free their parameters between their passes, which autograd.grad ends
    if wrapper is not None:
        raise FewbitError(f"plan before {wrapper}, which changes what can be measured, and say parallel=")


def _check_parallel(step: Step, others: Mapping[str, object]) -> None:
    """Raise FewbitError if a tensor-parallel step is asked for what ranks may not do alike, or fits no plan.

    Its ranks run the same steps, or wait for one another: what is tried once times differ by rank is left out. A module
    that takes a DTensor and has no parameters in shards would save it exactly, whatever a plan said.
    """
    if not step.is_tensor_parallel:
        return
    if asked := [name for name, value in others.items() if value]:
        raise FewbitError(f"a tensor-parallel model is planned as it runs, on its batch: leave out {asked[0]}=")
    taking: list[str] = []

    def note(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        taking.extend([name] if any(type(x).__name__ == "DTensor" for x in args) else [])

    own = ((name, m) for name, m in step.model.named_modules() if not (list(m.children()) or isinstance(m, nn.Linear)))
    hooks = [module.register_forward_pre_hook(partial(note, name)) for name, module in own]
    try:
        with step.apart(), torch.no_grad():
            step.output()
    finally:
        for hook in hooks:
            hook.remove()
    if taking:
        raise FewbitError(f"{taking[0]} takes a DTensor: plan before parallelize_module, or use local outputs there")


def _agreed(found: Plan) -> Plan:
    """Return the plan of the first rank with the same model, so that these ranks save the same; their batches tell them
    different errors. Ranks of a pipeline have other stages, and plans of their own."""
    if not (dist.is_available() and dist.is_initialized()):
        return found
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, found)
    return next(plan for plan in plans if plan.model == found.model)


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
        raise FewbitError("a plan needs no batch and no limits: fit(model, plan=plan)")
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
    if parallel is not None and parallel.startswith("fsdp"):
        raise FewbitError("a model that will be sharded is planned once, before")
    step, limits = Step(model, args, keywords, loss), Limits(**before.limits)  # pyright: ignore[reportArgumentType]
    if step.samples < before.batch:
        step = step.with_samples(before.batch)
    recompute = before.recompute < 1 or any(choice.method == RECOMPUTE for choice in before.choices)
    static = static_bytes(model, optimizer)
    with structure_aside(model):
        planner = partial(CompiledPlanner, host_memory=before.host_memory) if before.compiled else Planner
        return _agreed(planner(step, limits, price, static, None, recompute, parallel=kind).plan())


def _number(value: float | None, is_right: Callable[[float], bool], accepted: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not is_right(value)):
        raise FewbitError(f"{accepted}, not {shown(value)}")
    return None if value is None else float(value)
