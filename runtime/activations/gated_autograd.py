"""Forward and backward of a gated linear unit for autograd: `keep` makes the saved parts, `gradients` reads them.

Used by the functions (gated.py) and by the whole block (layers/gated_mlp.py). They are plain functions of tensors and
constants, so that torch.compile traces them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backends.forwards import forward_of
from ..backends.reference.glu import product, product_over
from ..backends.reference.glu_derivatives import derivative_of
from ..ops.arguments import refuse
from ..quantizers import Rotated
from ..tensors.glu_parts import GLUPlan, Wanted
from ..tensors.traits import as_kind

# Copies in the codes of `Rotated` are tensors that autograd saves. Two copies are turned by signs of their own, so that
# the mean of their product is right too. Groups of 128 lie in the rows of the last dimension.
_GROUP_SIZE = Rotated.group_size


def compress_rotated(xs: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, ...]:
    """Return for each of `xs` a buffer of its codes in so many bits, and at the end the key of their signs."""
    key = ops.draw_seeds(xs[0], 1)
    rows = [as_kind(x.reshape(-1, _features(x.shape)), keep_positive=False) for x in xs]
    buffers = ops.rotated_quantize_buffers(rows, key, [*range(len(xs))], bits, [True] * len(xs), _GROUP_SIZE)
    return (*buffers, key)


def decompress_rotated(
    copies: Sequence[Tensor], bits: Sequence[int], shape: torch.Size, dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors, all of one shape, that `compress_rotated` gave `copies` of."""
    *buffers, key = copies
    features = [_features(shape)] * len(buffers)
    rows = ops.rotated_dequantize_buffers(buffers, key, [*range(len(bits))], bits, features, _GROUP_SIZE, dtype)
    return [x.view(shape) for x in rows]


def _features(shape: torch.Size) -> int:
    return max(1, shape[-1]) if shape else 1


def keep(gate: Tensor, up: Tensor, plan: GLUPlan, wanted: Wanted) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return h = act(gate) · up and the parts that its backward pass needs for the wanted results."""
    has_code, has_up, has_second = wanted.kept(plan.keep)
    if plan.keep == "exact":
        h = product(gate, up, plan.function, plan.parameters)[1]
        if wanted.h_alone:
            return h, (h,)
        return h, (*([up] if has_up else []), *([gate] if has_second else []))
    if plan.is_rotated:
        activated = forward_of(plan.function).call(gate, *plan.parameters)
        second = activated if plan.keep == "parts" else gate
        copied = [(up, plan.up_bits)] * has_up + [(second, plan.second_bits)] * has_second
        copies = compress_rotated([x for x, _ in copied], [bits for _, bits in copied]) if copied else ()
        h = product_over(activated, up, plan.function)
        return h, (*([_codes(gate, plan)] if has_code else []), *copies)
    at_random = has_code and plan.at_random
    constants = _constants(plan, has_code and not at_random, has_up, has_second)
    h, codes, *copies = ops.glu(gate, up, ops.draw_seeds(gate, 2), *constants)
    if at_random:  # in a pass of its own: the codes in one with act(gate) are those of tables without randomness
        codes = _codes(gate, plan)
    return h, (codes, *copies)


def _codes(gate: Tensor, plan: GLUPlan) -> Tensor:
    """Return the codes of act'(gate)."""
    gate = gate.contiguous()
    if plan.at_random:
        return ops.encode_at_random(gate, plan.table, ops.draw_seeds(gate, 1))
    return ops.encode(gate, plan.table)


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
    if plan.keep == "exact" or plan.is_rotated:
        return _by_torch(grad, parts, plan, kept_for, wanted)
    arguments: tuple[Any, ...] = (*parts, *_constants(plan, *kept_for.kept(plan.keep)), list(wanted))
    return ops.glu_backward(grad, *arguments)


def _constants(plan: GLUPlan, has_code: bool, has_up: bool, has_second: bool) -> tuple[Any, ...]:
    bits = (plan.up_bits if has_up else 0, plan.second_bits if has_second else 0)
    return plan.function, plan.parameters, plan.table if has_code else "", *bits, plan.keep == "inputs"


def _by_torch(
    grad: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, kept_for: Wanted, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operations of torch's own backward pass, on what was saved or what comes back from its copies."""
    if plan.keep == "exact" and kept_for.h_alone:
        return grad.new_empty(0), grad.new_empty(0), parts[0]
    has_code, has_up, has_second = kept_for.kept(plan.keep)
    left = list(parts)
    codes = left.pop(0) if has_code else None
    if left and plan.keep != "exact":
        bits = [plan.up_bits] * has_up + [plan.second_bits] * has_second
        left = decompress_rotated(left, bits, grad.shape, grad.dtype)
    up = left.pop(0) if has_up else grad
    second = left.pop(0) if has_second else grad
    d_gate, d_up, h = (grad.new_empty(0) for _ in range(3))
    if wanted.d_gate:
        d_gate = grad * up
        if codes is None:
            d_gate = derivative_of(plan.function)(d_gate, second)
        else:
            d_gate = ops.multiply(d_gate, codes, plan.table, up.stride())
    if wanted.d_up or wanted.h:
        activated = second if plan.keep == "parts" else forward_of(plan.function).call(second, *plan.parameters)
        d_up = grad * activated if wanted.d_up else d_up
        h = activated * up if wanted.h else h
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
