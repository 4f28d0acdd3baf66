"""The activations of `torch.nn.functional`, with torch's names and arguments plus `bits` and `table`.

Forward they are torch's own functions, bit for bit. For the backward pass they keep ⌈n/8⌉·bits bytes instead of x, and
the gradient is multiplied by the table's level instead of f'(x) (Few-bit Backward, Listing 1). Where no gradient is
asked for, they are torch's functions and keep nothing. First derivatives by torch.func (grad, vjp, vmap, jacrev) work
like backward; second ones, and forward mode where a gradient is recorded as well, are refused.

Where f' takes two values (relu, relu6, leaky_relu, hardtanh, hardsigmoid, hardshrink, softshrink, threshold) one bit
holds it exactly, whatever `bits` allows: the gradient is torch's own, at the kinks too. (Of hardsigmoid in float64 it
is grad/6, where torch multiplies by 1/6 rounded to float32.)

swiglu, geglu, reglu and glu are act(gate) · up of two tensors: see glu/.

All take float64, float32, float16 or bfloat16 of any shape and layout, and raise `FewbitError` for wrong arguments.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from .. import ops
from ..backends.arguments import check_dtype, checked
from ..backends.forwards import forward_of
from ..backends.torch_functions import gelu_function
from ..tensors.layout import as_dense
from . import fast_path, transforms
from .gated import geglu, glu, reglu, swiglu
from .table_lookup import resolve_key
from .transforms import keeps
from .user_functions import Custom, custom, solve_custom

__all__ = [
    "activation",
    "celu",
    "elu",
    "geglu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "quick_gelu",
    "reglu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "squared_relu",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
]


def relu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.relu`; its derivative takes one bit, exactly, whatever `bits` allows."""
    return apply(input, "relu", (), resolve_key("relu", (), bits, table), inplace)


def relu6(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.relu6`, exact in one bit."""
    return apply(input, "relu6", (), resolve_key("relu6", (), bits, table), inplace)


def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.leaky_relu`, exact in one bit."""
    parameters = (number("negative_slope", negative_slope),)
    return apply(input, "leaky_relu", parameters, resolve_key("leaky_relu", parameters, bits, table), inplace)


def elu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.elu` with `bits` bits kept; each alpha has its own table."""
    parameters = (number("alpha", alpha),)
    return apply(input, "elu", parameters, resolve_key("elu", parameters, bits, table), inplace)


def celu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.celu` with `bits` bits kept; each alpha has its own table."""
    parameters = (number("alpha", alpha),)
    return apply(input, "celu", parameters, resolve_key("celu", parameters, bits, table), inplace)


def selu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.selu` with `bits` bits kept."""
    return apply(input, "selu", (), resolve_key("selu", (), bits, table), inplace)


def gelu(input: Tensor, approximate: str = "none", *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.gelu` with `bits` bits kept; ``approximate="tanh"`` has its own table."""
    function = gelu_function(approximate)
    return apply(input, function, (), resolve_key(function, (), bits, table))


def silu(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.silu` (Swish) with `bits` bits kept."""
    return apply(input, "silu", (), resolve_key("silu", (), bits, table), inplace)


def mish(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.mish` with `bits` bits kept."""
    return apply(input, "mish", (), resolve_key("mish", (), bits, table), inplace)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.softplus` with `bits` bits kept; another beta or threshold has its own table."""
    parameters = (number("beta", beta), number("threshold", threshold))
    return apply(input, "softplus", parameters, resolve_key("softplus", parameters, bits, table))


def softsign(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.softsign` with `bits` bits kept."""
    return apply(input, "softsign", (), resolve_key("softsign", (), bits, table))


def sigmoid(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.sigmoid` with `bits` bits kept."""
    return apply(input, "sigmoid", (), resolve_key("sigmoid", (), bits, table))


def logsigmoid(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.logsigmoid` with `bits` bits kept."""
    return apply(input, "logsigmoid", (), resolve_key("logsigmoid", (), bits, table))


def tanh(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.tanh` with `bits` bits kept."""
    return apply(input, "tanh", (), resolve_key("tanh", (), bits, table))


def tanhshrink(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.tanhshrink` with `bits` bits kept."""
    return apply(input, "tanhshrink", (), resolve_key("tanhshrink", (), bits, table))


def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.hardtanh`, exact in one bit."""
    parameters = (number("min_val", min_val, infinite=True), number("max_val", max_val, infinite=True))
    return apply(input, "hardtanh", parameters, key_for(input.dtype, "hardtanh", parameters, bits, table), inplace)


def hardsigmoid(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.hardsigmoid`, exact in one bit."""
    return apply(input, "hardsigmoid", (), resolve_key("hardsigmoid", (), bits, table), inplace)


def hardswish(input: Tensor, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """`torch.nn.functional.hardswish` with `bits` bits kept."""
    return apply(input, "hardswish", (), resolve_key("hardswish", (), bits, table), inplace)


def hardshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.hardshrink`, exact in one bit."""
    parameters = (number("lambd", lambd, infinite=True),)
    return apply(input, "hardshrink", parameters, key_for(input.dtype, "hardshrink", parameters, bits, table))


def softshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.softshrink`, exact in one bit."""
    parameters = (number("lambd", lambd),)
    return apply(input, "softshrink", parameters, key_for(input.dtype, "softshrink", parameters, bits, table))


def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
) -> Tensor:
    """`torch.nn.functional.threshold`, exact in one bit."""
    parameters = (number("threshold", threshold, infinite=True), number("value", value, infinite=True))
    return apply(input, "threshold", parameters, key_for(input.dtype, "threshold", parameters, bits, table), inplace)


def quick_gelu(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """x·σ(1.702x), the GELU of CLIP, operation by operation as `transformers` computes it."""
    return apply(input, "quick_gelu", (), resolve_key("quick_gelu", (), bits, table))


def squared_relu(input: Tensor, *, bits: int | None = None, table: Table | None = None) -> Tensor:
    """relu(x)² (Primer), as `transformers` computes it."""
    return apply(input, "squared_relu", (), resolve_key("squared_relu", (), bits, table))


@torch.compiler.assume_constant_result
def key_for(
    dtype: torch.dtype,
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
) -> str:
    """Return the key of the table for x of `dtype`, where f' jumps at parameters that torch rounds before comparing."""
    if table is None:
        parameters = forward_of(function).as_compared(parameters, dtype)
    return resolve_key(function, parameters, bits, table)


_NUMBERS = (int, float, np.integer, np.floating)  # a tuple: torch 2.6's compiler cannot read a union


def number(name: str, value: object, infinite: bool = False) -> float:
    """Return the argument `name` as a float; raises `FewbitError` if it is no number, NaN, or may not be infinite."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise FewbitError(f"{name} must be a number, not {shown(value)}")
    if not math.isfinite(value) and not (infinite and math.isinf(value)):
        kind = "number" if infinite else "finite number"
        raise FewbitError(f"{name} must be a {kind}, not {shown(value)}")
    return float(value)


def activation(
    input: Tensor,
    function: str | Callable[[Tensor], Tensor],
    *,
    bits: int | None = None,
    table: Table | None = None,
    kinks: Sequence[float] = (),
) -> Tensor:
    """Return f(input) of any pointwise activation, an expression in x or a callable, with `bits` bits kept.

    See `fewbit.FewBit` for the arguments. What a callable is given for the first time costs the solution of its table,
    so give the same object at every call: a lambda written in a `forward` is a new one each time.
    """
    name, parameters, key = _custom_for(input.dtype, function, bits, table, tuple(kinks))
    if not isinstance(function, str) and not keeps(input):
        return function(input)
    return apply(input, name, parameters, key)


@torch.compiler.assume_constant_result
def _custom_for(
    dtype: torch.dtype,
    function: str | Callable[[Tensor], Tensor],
    bits: int | None,
    table: Table | None,
    kinks: tuple[float, ...],
) -> tuple[str, tuple[float, ...], str]:
    own, key = _cached_custom(dtype, function, bits, table, kinks)
    return own.function, tuple(own.arguments.values()), key


@lru_cache(maxsize=256)
def _cached_custom(
    dtype: torch.dtype,
    function: str | Callable[[Tensor], Tensor],
    bits: int | None,
    table: Table | None,
    kinks: tuple[float, ...],
) -> tuple[Custom, str]:
    own = custom(function)
    if table is None and (kinks or not isinstance(function, str)):
        table = solve_custom(function, bits, kinks)
    return own, key_for(dtype, own.function, tuple(own.arguments.values()), bits, table)


def apply(x: Tensor, function: str, parameters: tuple[float, ...], key: str, inplace: bool = False) -> Tensor:
    """Return f(x), keeping packed codes if a gradient will be asked for.

    Args:
        x: any shape and layout; float64, float32, float16 or bfloat16 where a gradient is asked for.
        function: a name in `FORWARDS`; `parameters` are the values of its parameters.
        key: of a registered table.
        inplace: overwrite `x` with f(x) and return it, where torch has that.

    Raises:
        TypeError: a gradient is asked for and the dtype is none of those; integers that torch's function does not take.
    """
    overwrite = forward_of(function).inplace if inplace else None
    if not keeps(x):
        forward = overwrite or forward_of(function).call
        return checked(function, x, forward, x, *parameters)
    if transforms.are_active():
        y = transforms.activation(x, function, parameters, key)
        return y if overwrite is None else x.copy_(y)
    if torch.compiler.is_compiling():
        # The compiler keeps the order of strides, which says nothing about an expanded tensor. It decides about memory
        # too; what it saves for the backward pass is what the op returns.
        source = x.clone() if 0 in x.stride() else x
        y = ops.activation(source, function, parameters, key)[0]
        return y if overwrite is None else x.copy_(y)
    if overwrite is None:
        if fast_path.serves(x):
            return fast_path.activation(x, function, parameters, key)
        return ops.activation(x, function, parameters, key)[0]
    check_dtype(x, function)
    if x._base is not None and x._base.is_leaf and x._base.requires_grad:  # torch 2.6 lets a custom function do it
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    _Inplace.apply(x, key)  # first the graph: what torch refuses to overwrite is refused before it is
    with torch.no_grad():
        overwrite(x, *parameters)
    # Of a view torch makes the graph anew after each write, when it is first asked for; register_hook, which FSDP
    # calls, does not ask and crashes (torch 2.6 to 2.13).
    _ = x.grad_fn
    return x


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
