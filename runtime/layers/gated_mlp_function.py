"""A gated MLP of plain projections as one node of the graph, and the copy of its input in few bits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..activations.gated import compress_rotated, decompress_rotated, gradients, keep
from ..ops.declare import refuse
from ..quantizers.per_group import constant_group_within
from ..tensors.glu_parts import GROUP_SIZE, GLUPlan, Wanted
from .base import owned
from .rebuilding import Rebuilding


class fewbit_gated_mlp(torch.autograd.Function):
    """x, weights -> y; graphs show this name. If `up_weight` is None, `gate_weight` holds both, gate first or last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        plan: GLUPlan,
        input_bits: int | None,
        gate_last: bool,
    ) -> Tensor:
        """Return y; save the tensors that the required gradients need."""
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down = ctx.needs_input_grad[:6]
        if up_weight is None:
            need_up, need_up_bias = need_gate, need_gate_bias
            gate, up = F.linear(x, gate_weight, gate_bias).chunk(2, dim=-1)
            gate, up = (up, gate) if gate_last else (gate, up)
        else:
            gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
        wanted = Wanted(need_x or need_gate or need_gate_bias, need_x or need_up or need_up_bias, need_down)
        h, parts = keep(gate, up, plan, wanted)
        del gate, up  # nothing needs them while y takes its room
        y = owned(F.linear(h, down_weight, down_bias))
        kept_x: tuple[Tensor, ...] = ()
        if need_gate or need_up:
            kept_x = (x,) if input_bits is None else _copy_of(x, input_bits, plan.is_rotated)
        weights = (
            gate_weight if need_x else None,
            up_weight if need_x else None,
            down_weight if wanted.d_gate or wanted.d_up else None,
        )
        ctx.save_for_backward(*weights, *kept_x, *parts)
        ctx.plan, ctx.input_bits, ctx.wanted, ctx.count_of_x = plan, input_bits, wanted, len(kept_x)
        ctx.is_fused, ctx.gate_last = up_weight is None, gate_last
        ctx.x_shape, ctx.h_shape, ctx.dtype = x.shape, h.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the required gradients."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # in compiled code the compiler refuses
            refuse()
        gate_weight, up_weight, down_weight, *saved = ctx.saved_tensors
        kept_x, parts = saved[: ctx.count_of_x], tuple(saved[ctx.count_of_x :])
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down, need_down_bias = ctx.needs_input_grad[:7]
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        wanted: Wanted = ctx.wanted
        tall = (-1, ctx.h_shape[-1])
        # If only h is rebuilt, nothing but the shape of its gradient is read.
        d_h = (dy @ down_weight).view(ctx.h_shape) if down_weight is not None else dy.new_empty(ctx.h_shape)
        d_gate, d_up, h = gradients(d_h, parts, ctx.plan, wanted, wanted)
        d_down = dy.t() @ h.view(tall) if need_down else None
        d_down_bias = dy.sum(0) if need_down_bias else None
        del d_h, h
        x = dy
        if kept_x:
            x = kept_x[0]
            if ctx.input_bits is not None:
                x = _read(kept_x, ctx.input_bits, ctx.x_shape, ctx.dtype, ctx.plan.is_rotated)
            x = x.reshape(-1, ctx.x_shape[-1])
        if ctx.is_fused:
            halves = (d_up, d_gate) if ctx.gate_last else (d_gate, d_up)
            both = torch.cat([half.view(tall) for half in halves], 1) if wanted.d_gate else dy
            d_x = both @ gate_weight if need_x else None
            of_gate, of_up = _of_projection(both, x, need_gate, need_gate_bias), (None, None)
        else:
            d_gate, d_up = (d.view(tall) if d.numel() else d for d in (d_gate, d_up))
            d_x = (d_gate @ gate_weight).add_(d_up @ up_weight) if need_x else None
            of_gate = _of_projection(d_gate, x, need_gate, need_gate_bias)
            of_up = _of_projection(d_up, x, need_up, need_up_bias)
        if d_x is not None:
            d_x = d_x.view(ctx.x_shape)
        return d_x, *of_gate, *of_up, d_down, d_down_bias, None, None, None


def _of_projection(grad: Tensor, x: Tensor, weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    return grad.t() @ x if weight else None, grad.sum(0) if bias else None


@contextmanager
def copying(x: Tensor, bits: int, is_rotated: bool) -> Iterator[None]:
    """Within this block, save one copy in few bits instead of x."""
    shape, dtype = x.shape, x.dtype

    def make(*copy: Tensor) -> Tensor:
        return _read(copy, bits, shape, dtype, is_rotated)

    with Rebuilding() as rebuilding:
        rebuilding.save(x, make, lambda: _copy_of(x, bits, is_rotated))
        yield


def _copy_of(x: Tensor, bits: int, is_rotated: bool) -> tuple[Tensor, ...]:
    """Return a copy of the block's input in few bits; no group spans two rows of features."""
    if is_rotated:
        return compress_rotated([x], [bits])
    return ops.copy_in_groups(x, ops.draw_seeds(x, 1), bits, constant_group_within(x.shape[-1], GROUP_SIZE))


def _read(copy: Sequence[Tensor], bits: int, shape: torch.Size, dtype: torch.dtype, is_rotated: bool) -> Tensor:
    """Return the values of a copy made by `_copy_of`."""
    if is_rotated:
        return decompress_rotated(copy, [bits], shape, dtype)[0]
    packed, groups = copy
    return ops.read_copy(packed, groups, bits, shape, dtype, constant_group_within(shape[-1], GROUP_SIZE))
