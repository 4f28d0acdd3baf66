"""Forward and backward of a gated linear unit for autograd: `keep` makes the saved parts, `gradients` reads them.

Used by the functions (gated.py) and by the whole block (layers/gated_mlp.py). They are plain functions of tensors and
constants, so that torch.compile traces them.
"""

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backends.reference.glu import product
from ..backends.reference.glu_derivatives import derivative_of
from ..ops.arguments import refuse
from ..tensors.glu_parts import GLUPlan, Wanted


def keep(gate: Tensor, up: Tensor, plan: GLUPlan, wanted: Wanted) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return h = act(gate) · up and the parts that its backward pass needs for the wanted results."""
    has_code, has_up, has_second = wanted.kept(plan.keep)
    if plan.keep == "exact":
        h = product(gate, up, plan.function, plan.parameters)[1]
        if wanted.h_alone:
            return h, (h,)
        return h, (*([up] if has_up else []), *([gate] if has_second else []))
    at_random = has_code and plan.at_random
    constants = _constants(plan, has_code and not at_random, has_up, has_second)
    h, codes, *copies = ops.glu(gate, up, ops.draw_seeds(gate, 2), *constants)
    if at_random:  # in a pass of its own: the codes in one with act(gate) are those of tables without randomness
        codes = ops.encode_at_random(gate.contiguous(), plan.table, ops.draw_seeds(gate, 1))
    return h, (codes, *copies)


def gradients(
    grad: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, kept_for: Wanted, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate, d_up and h; results that are not wanted have no elements.

    Args:
        grad: of h. If only h is wanted, any tensor of its shape and dtype.
        parts: from `keep`.
        plan, kept_for: arguments of `keep`.
        wanted: a subset of `kept_for`.
    """
    if plan.keep == "exact":
        return _exact(grad, parts, plan, kept_for, wanted)
    arguments: tuple[Any, ...] = (*parts, *_constants(plan, *kept_for.kept(plan.keep)), list(wanted))
    return ops.glu_backward(grad, *arguments)


def _constants(plan: GLUPlan, has_code: bool, has_up: bool, has_second: bool) -> tuple[Any, ...]:
    bits = (plan.up_bits if has_up else 0, plan.second_bits if has_second else 0)
    return plan.function, plan.parameters, plan.table if has_code else "", *bits, plan.keep == "inputs"


def _exact(
    grad: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, kept_for: Wanted, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operations of torch's own backward pass, with act(gate) recomputed."""
    if kept_for.h_alone:
        return grad.new_empty(0), grad.new_empty(0), parts[0]
    kept = kept_for.kept(plan.keep)
    left = list(parts)
    up = left.pop(0) if kept[1] else grad
    gate = left.pop(0) if kept[2] else grad
    d_gate, d_up, h = (grad.new_empty(0) for _ in range(3))
    if wanted.d_gate:
        d_gate = derivative_of(plan.function)(grad * up, gate)
    if wanted.d_up or wanted.h:
        activated, h = product(gate, up, plan.function, plan.parameters)
        d_up = grad * activated
    return d_gate, d_up, h


class fewbit_glu(torch.autograd.Function):
    """gate, up -> h; a graph shows the name. Also returns the parts, for callers that rebuild h."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, plan: GLUPlan, rebuilds: bool) -> tuple[Tensor, ...]:
        """Return h, and the saved parts."""
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], rebuilds)
        h, parts = keep(gate, up, plan, wanted)
        ctx.save_for_backward(*parts)
        ctx.plan, ctx.kept_for = plan, wanted
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # no zeros for the parts, which have no gradient
        if plan.keep != "exact":
            ctx.mark_non_differentiable(*parts)
            return h, *parts
        return (h,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return d_gate and d_up."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # while compiling, the compiler refuses
            refuse()
        if grads[0] is None:
            return None, None, None, None
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], False)
        d_gate, d_up, _ = gradients(grads[0], ctx.saved_tensors, ctx.plan, ctx.kept_for, wanted)
        return d_gate if wanted.d_gate else None, d_up if wanted.d_up else None, None, None
