"""`fewbit.fits(model, batch, memory="24GiB")`: whether some training fits, and what the least memory is made of.

Only bytes are asked for, so a step is traced on the meta device, where nothing is computed, and the least of any plan
is found: errors and times decide nothing.
"""

import copy
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...tables import FewbitError
from ...tables.columns import WIDTH, wrapped_sizes
from ...tables.sizes import parse_share, parse_size, size_like
from ..convert.report import read_inputs
from ..memory.peak import no_collection
from .document import PeakMemory
from .eager_planner import Planner
from .fitted import unfitted
from .planner import check_whole
from .problem import Limits, Price
from .seconds import Speeds
from .static import parallel_of, static_bytes
from .step import Loss, Step
from .structure import structure_aside

_ANY_TIME = 1e6  # times of an exact step: no plan is that slow


@dataclass(frozen=True)
class Fits:
    """Whether a training fits into a memory. As a bool, whether it does.

    Attributes:
        memory: that there is, in bytes.
        least: the peak of the plan that takes the least of all, and what it is made of.
        exact: the peak of a step that saves all exactly, in bytes.
        error: of the gradient by the least plan, relative, estimated from shapes.
        remedies: what else may be tried where it does not fit, in words.
    """

    memory: int
    least: PeakMemory
    exact: int
    error: float
    remedies: str

    def __bool__(self) -> bool:
        return self.least.total <= self.memory

    def __str__(self) -> str:
        least, exact, given = (size_like(size, self.memory) for size in (self.least.total, self.exact, self.memory))
        if self.exact <= self.memory:
            return f"yes, as it is: an exact step takes {exact} of {given} (the least of any plan is {least})"
        answer = "yes, by a plan" if self else "no, not by any eager plan"
        parts = ("parameters", "gradients", "optimizer", "saved", "workspace")
        sizes = ", ".join(f"{part} {size_like(getattr(self.least, part), self.memory)}" for part in parts)
        return "\n".join(
            (
                f"{answer}: the least is {least} of {given}, an exact step takes {exact}",
                f"the least, {self.least.moment}:",
                *wrapped_sizes(sizes),
                f"the least plan's error of the gradient, estimated from shapes: {self.error:.3g}",
                *([f"a plan for {given} errs by that at most, mostly by less: fewbit plan"] if self else []),
                *([] if self else wrap(f"try {self.remedies}", WIDTH, subsequent_indent="  ")),
            )
        )


def fits(
    model: nn.Module,
    *inputs: Any,
    memory: str | float,
    loss: Loss | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    recompute: bool = True,
    parallel: str | None = None,
) -> Fits:
    """Return whether some training of a model fits into a memory, the least it takes, and what that is made of.

    The step of a copy on the meta device is traced; nothing is computed and the model is not changed. What fits is
    found by `fewbit.plan` with the same arguments, or trained by `fewbit.fit`. Compiled steps are not looked at: they
    may take less.

    Args:
        model: in the mode in which it trains, on any device; on the meta device it takes no memory itself.
        *inputs: a batch: arguments of the model, or one mapping of its keywords, with any values.
        memory: most bytes at the peak of a step, as "24GiB"; or a share of what the exact step takes, as "50%".
        loss, optimizer, recompute, parallel: as for `fewbit.plan`.

    Returns:
        A `Fits`, which is true if it fits.

    Raises:
        FewbitError: an argument is wrong, the output is no loss, or the forward pass asks for values of tensors, which
            the meta device has not.

    Example:
        if not fewbit.fits(model, {"input_ids": ids, "labels": ids}, memory="24GiB"):
            model.requires_grad_(False)
    """
    share = parse_share(memory)
    given = 0 if share is not None else parse_size(memory)
    check_whole(model)
    args, keywords = read_inputs(inputs[0]) if len(inputs) == 1 else (inputs, {})
    static, kind = static_bytes(model, optimizer), parallel_of(parallel, model)
    with unfitted(model), structure_aside(model), no_collection(collect=False):  # a fifth of the time
        twin = _without_values(model)
        args, keywords = tree_map_only(Tensor, lambda t: t.to("meta"), (args, keywords))
        step = Step(twin, args, keywords, loss)
        # Nothing asks for times, and a roofline takes a forward pass to count, a quarter of all that is done.
        planner = Planner(step, Limits(time=_ANY_TIME), Price(), static, None, recompute, 0, kind, Speeds())
        plan = planner.least()
    if share is not None:
        given = int(share * plan.exact_peak)
    return Fits(given, plan.peak, plan.exact_peak, plan.error, planner.remedies(plan.peak))


def _without_values(model: nn.Module) -> nn.Module:
    """Return the model if it is on the meta device, and else a copy of it there."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    if all(t.device.type == "meta" for t in tensors.values()):
        return model
    memo: dict[int, Any] = {}
    for key, t in tensors.items():
        if type(t) not in (Tensor, nn.Parameter):
            raise FewbitError(f"a {type(t).__name__} has no copy on the meta device: plan the model as it is")
        bare = torch.empty_like(t, device="meta")
        memo[key] = nn.Parameter(bare, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else bare
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise FewbitError(f"the model cannot be copied to the meta device: {error}") from error
