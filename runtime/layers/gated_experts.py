"""Experts of a mixture whose weights are fused in three dimensions, with the parts of act(gate) · up in few bits.

    gate_up_proj (experts, 2 × intermediate, hidden), down_proj (experts, hidden, intermediate), or transposed

`transformers` runs such experts in several ways (a loop, `batched_mm`, `grouped_mm`, `deepgemm`), each of which calls
the method `_apply_gate` for the product h = act(gate) · up, of the tokens of all experts or of one. The class's own
forward runs here too, with that method computing the product of gated_mlp.py; where the projection back saves h, its
parts are saved instead (rebuilding.py). Routing is not touched: which experts a token goes to, and their weights, are
exact.

Loops that compute the product in place of a call are written anew, operation by operation (`_loop`).
"""

from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import Table
from .. import ops
from ..activations.dispatch import are_active, keeps
from ..activations.gated import apply, fewbit_glu
from ..activations.gated_modules import check_plan, plan_text
from ..tensors.glu_parts import GLUPlan, Wanted
from ..tensors.levels import register_unpickled, table_of
from .base import CompressedFunction, check_first_derivative
from .base import apply as apply_function
from .dropout import noise_table
from .gated_mlp import save_parts
from .rebuilding import Rebuilding

__all__ = ["Gate", "GatedExperts", "form_of_experts", "implementation"]


# Of the forward pass that runs, in each thread its own.
_RUNNING: ContextVar[Rebuilding | None] = ContextVar("rebuilding", default=None)


class Gate(NamedTuple):
    """What happens to the output of the first projection before act(gate) · up.

    Attributes:
        interleaved: whether gate and up take turns; else they are its two halves, gate first.
        limit: gate is cut at ``limit``, up at ``-limit`` and ``limit``; None: neither is.
        plus_one: whether one is added to up, as in GPT-OSS.
    """

    interleaved: bool = False
    limit: float | None = None
    plus_one: bool = False

    def operands(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up; where each was not cut is saved in one bit."""
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = _clamp(gate, None, self.limit), _clamp(up, -self.limit, self.limit)
        return gate, up + 1 if self.plus_one else up


class GatedExperts(nn.Module):
    """Base of the form of a class of experts; `fewbit.convert` changes the class of the experts to it.

    Attributes:
        former: the original class, which follows in the method resolution order.
        plan: what to save of the product.
        form: what precedes it.
        loops: whether the forward of `former` is the loop that `_loop` repeats.
    """

    former: ClassVar[type[nn.Module]]
    plan: GLUPlan
    form: Gate
    loops: bool
    _table: Table

    def set_plan(self, plan: GLUPlan, form: Gate, loops: bool) -> None:
        """Set what to save; the weights do not change."""
        self.plan, self.form, self.loops, self._table = plan, form, loops, table_of(plan.table)

    @property
    def table(self) -> Table:
        """The table that replaces act'."""
        return self._table

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the class returns."""
        run = super().forward
        if self.loops and implementation(self) == "eager":
            run = self._loop
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or are_active():
            return run(*args, **kwargs)
        with Rebuilding() as rebuilding:
            before = _RUNNING.set(rebuilding)
            try:
                return run(*args, **kwargs)
            finally:
                _RUNNING.reset(before)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = self.form.operands(gate_up)
        rebuilding, down = None if torch.compiler.is_compiling() else _RUNNING.get(), getattr(self, "down_proj", None)
        needs_h = isinstance(down, Tensor) and down.requires_grad
        if rebuilding is None or not needs_h:
            return apply(gate, up, self.plan)
        wanted = Wanted(keeps(gate), keeps(up), needs_h)
        h, *parts = fewbit_glu.apply(gate, up, self.plan, needs_h)
        if self.plan.keep == "exact":
            if wanted.h_alone:
                return h
            parts = [up.detach(), gate.detach()]
        rebuilding.forget()  # the product of the expert before
        save_parts(rebuilding, h, tuple(parts), self.plan, wanted)
        return h

    def _loop(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights: Any = self
        y = torch.zeros_like(hidden_states)
        with torch.no_grad():
            mask = F.one_hot(top_k_index, num_classes=weights.num_experts + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for (expert,) in hit:
            if expert == weights.num_experts:  # a token of another process
                continue
            position, token = torch.where(mask[expert])
            h = self._apply_gate(F.linear(hidden_states[token], weights.gate_up_proj[expert]))
            of_expert = F.linear(h, weights.down_proj[expert]) * top_k_weights[token, position, None]
            y.index_add_(0, token, of_expert.to(y.dtype))
        return y

    def __reduce__(self) -> tuple[Any, ...]:
        """Refer to the former class in copies and pickles, because this class cannot be imported by name."""
        return _empty, (self.former,), vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_plan(self, register_unpickled(self))  # another process may read this module

    def extra_repr(self) -> str:
        """Return the activation and the plan."""
        return f"{self.table.activation}, {plan_text(self.plan)}"


@cache
def form_of_experts(cls: type[nn.Module]) -> type[GatedExperts]:
    """Return the form of a class of experts."""
    return type(cls.__name__, (GatedExperts, cls), {"former": cls, "__doc__": GatedExperts.__doc__})


def _empty(cls: type[nn.Module]) -> GatedExperts:
    """Return experts of the form of `cls`, without attributes."""
    form = form_of_experts(cls)
    return form.__new__(form)


def implementation(experts: Any) -> str:
    """Return the name of the way in which `transformers` runs experts."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) or "eager"


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _clamp(x: Tensor, low: float | None, high: float) -> Tensor:
    if not keeps(x) or are_active():
        return x.clamp(low, high)
    return apply_function(PackedClamp, x, low, high)


class PackedClamp(CompressedFunction):
    """x -> x cut to [low, high]; saves in one bit whether an element lies there, ends included, as torch decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float) -> Tensor:
        """Return torch's output."""
        inside = (x <= high) if low is None else (x >= low) & (x <= high)
        y = x.clamp(low, high)
        noise = inside.to(x.dtype)
        ctx.key, ctx.stride = noise_table(0.0), noise.stride()
        ctx.save_for_backward(ops.encode(noise, ctx.key))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient where the input was not cut."""
        check_first_derivative()
        return ops.multiply(grads[0], ctx.saved_tensors[0], ctx.key, ctx.stride), None, None
