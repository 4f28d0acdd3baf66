"""Dropout: one bit for each element, exact.

    y = x · noise,   noise = 0 with probability p, else 1/(1 − p),      ∇x = ∇y · noise

Torch saves the noise in the dtype of x (on a GPU as a byte). Here one bit encodes it, as `fewbit.ReLU` encodes the step
of its derivative, with a table whose levels are 0 and 1/(1 − p).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import Table
from .. import ops
from ..tensors.levels import register_table
from .base import CompressedFunction, apply, check_first_derivative, compresses

__all__ = ["Dropout", "dropout", "dropout_and_bits", "noise_table"]


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, which saves one bit for each element; exact, and drops the same elements as torch.

    Any shape to the same; float16, bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.Dropout`, which raise torch's errors.

    Example:
        drop = fewbit.layers.Dropout(0.1)
        drop(torch.randn(8, 64, requires_grad=True)).sum().backward()
    """

    kept_bits = 1  # for each element

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        return dropout(input, self.p, self.training, self.inplace)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout`, which saves one bit for each element; exact.

    Args:
        input, p, training, inplace: torch's own; `input` of any shape.

    Returns:
        As `input`, torch's bit for bit.

    Example:
        fewbit.layers.dropout(torch.randn(8, 64, requires_grad=True), 0.1).sum().backward()
    """
    if not training or not 0 < p < 1 or not compresses(input):
        return F.dropout(input, p, training, inplace)
    return apply(PackedDropout, input, p, inplace)


def dropout_and_bits(
    input: Tensor, p: float, inplace: bool = False
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return `dropout(input, p)`, its packed bits, and a function (x, bits) -> x · noise that repeats it.

    With `inplace` the elements that torch drops in place, though `input` stays.
    """
    y, packed = ListedDropout.eager.apply(input, p, inplace)
    stride = y.stride()  # and not y itself, which the function would keep
    return y, packed, lambda x, bits: ops.multiply(x, bits, noise_table(p), stride)


@torch.compiler.assume_constant_result
def noise_table(p: float) -> str:
    """Return the key of the table with the levels 0 and 1/(1 − p)."""
    return _registered(p)


@cache
def _registered(p: float) -> str:
    step = (np.array([0.5]), np.array([0, 1], np.uint8), np.array([0, 1 / (1 - p)]))
    return register_table(Table(f"dropout(p={p})", "interval", "uniform:0,1", *step, error=0.0))


class PackedDropout(CompressedFunction):
    """x -> x · noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, inplace: bool) -> Tensor:
        """Return torch's output; save a bit for each element."""
        y, noise = _dropped(x, p, inplace, overwrites=inplace)
        if inplace:
            ctx.mark_dirty(x)
        ctx.key, ctx.stride = noise_table(p), noise.stride()
        ctx.save_for_backward(ops.encode(noise, ctx.key))
        return x if inplace else y  # not y in place: to a compiler it is another tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times the noise."""
        check_first_derivative()
        (packed,) = ctx.saved_tensors
        return ops.multiply(grads[0], packed, ctx.key, ctx.stride), None, None


class ListedDropout(CompressedFunction):
    """x -> x · noise and the packed noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, inplace: bool) -> tuple[Tensor, Tensor]:
        """Return torch's output and a bit for each element, which is saved."""
        y, noise = _dropped(x, p, inplace)
        ctx.key, ctx.stride = noise_table(p), noise.stride()
        packed = ops.encode(noise, ctx.key)
        ctx.mark_non_differentiable(packed)
        ctx.save_for_backward(packed)
        return y, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times the noise."""
        return PackedDropout.backward(ctx, grads[0])


def _dropped(x: Tensor, p: float, inplace: bool, overwrites: bool = False) -> tuple[Tensor, Tensor]:
    """Return the output of torch's dropout, or of its form `inplace`, and a tensor that is 0 where it drops."""
    if x.device.type == "cpu" or inplace:  # in place a GPU draws as the CPU does, other numbers than `native_dropout`
        noise = F.dropout(torch.ones_like(x), p, inplace=inplace)  # what torch multiplies by, from the same draws
        return (x.mul_(noise) if overwrites else x * noise), noise
    y, mask = torch.native_dropout(x, p, True)
    return y, mask.to(x.dtype)
