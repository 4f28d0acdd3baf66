"""The activations of `torch.nn.functional`, with torch's names and arguments plus `bits` and `table`.

Forward they are torch's own functions, bit for bit. For the backward pass they keep ⌈n/8⌉·bits bytes instead of x, and
the gradient is multiplied by the table's level instead of f'(x) (Few-bit Backward, Listing 1). Where no gradient is
asked for, they are torch's functions and keep nothing.
"""

from typing import Any

import torch
from torch import Tensor

from ..tables import FewbitError, Table
from . import ops
from .forwards import forward_of
from .layout import as_dense
from .resolve import resolve_key

__all__ = ["gelu", "relu", "selu", "sigmoid", "silu", "softplus", "tanh"]


def relu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.relu`; its derivative takes one bit, exactly, whatever `bits` allows."""
    return apply(input, "relu", (), resolve_key("relu", (), bits, table), inplace)


def gelu(input: Tensor, approximate: str = "none", *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.gelu` with `bits` bits kept; ``approximate="tanh"`` has its own table."""
    function = gelu_function(approximate)
    return apply(input, function, (), resolve_key(function, (), bits, table))


def silu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.silu` (Swish) with `bits` bits kept."""
    return apply(input, "silu", (), resolve_key("silu", (), bits, table), inplace)


def sigmoid(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.sigmoid` with `bits` bits kept."""
    return apply(input, "sigmoid", (), resolve_key("sigmoid", (), bits, table))


def tanh(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.tanh` with `bits` bits kept."""
    return apply(input, "tanh", (), resolve_key("tanh", (), bits, table))


def selu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.selu` with `bits` bits kept."""
    return apply(input, "selu", (), resolve_key("selu", (), bits, table), inplace)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.softplus` with `bits` bits kept; another beta or threshold has its own table."""
    parameters = (float(beta), float(threshold))
    return apply(input, "softplus", parameters, resolve_key("softplus", parameters, bits, table))


def apply(x: Tensor, function: str, parameters: tuple[float, ...], key: str, inplace: bool = False) -> Tensor:
    """Return f(x), keeping packed codes if a gradient will be asked for.

    Args:
        x: any shape and layout; float64, float32, float16 or bfloat16 where a gradient is asked for.
        function: a name in `FORWARDS`; `parameters` are the values of its parameters.
        key: of a registered table.
        inplace: overwrite `x` with f(x) and return it, where torch has that.

    Raises:
        TypeError: a gradient is asked for and the dtype is none of those.
    """
    forward = forward_of(function)
    overwrite = forward.inplace if inplace else None
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (overwrite or forward.call)(x, *parameters)
    if torch.compiler.is_compiling():
        # The compiler keeps the order of strides, which says nothing about an expanded tensor. It decides about memory
        # too; what it saves for the backward pass is what the op returns.
        source = x.clone() if 0 in x.stride() else x
        y = ops.activation(source, function, parameters, key)[0]
        return y if overwrite is None else x.copy_(y)
    if overwrite is None:
        return ops.activation(x, function, parameters, key)[0]
    ops.check_dtype(x, function)
    if x._base is not None and x._base.is_leaf and x._base.requires_grad:  # torch 2.6 lets a custom function do it
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    _Inplace.apply(x, key)  # first the graph: what torch refuses to overwrite is refused before it is
    with torch.no_grad():
        return overwrite(x, *parameters)


class _Inplace(torch.autograd.Function):
    """The graph of f(x) written over x: takes the codes; the writing comes after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: str) -> Tensor:
        dense = as_dense(x)
        ctx.save_for_backward(ops.encode(dense, key))
        ctx.key = key
        ctx.stride = dense.stride()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return ops.gradient(grads[0], packed, ctx.key, ctx.stride), None


def gelu_function(approximate: str) -> str:
    """Return the name in `FORWARDS` of GELU with torch's `approximate` argument."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if not isinstance(approximate, str) or approximate not in names:
        raise FewbitError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return names[approximate]
