"""Shared path of every few-bit activation: check its arguments, look up its table, compute f(x) and save codes.

Plain tensors, as of training in eager mode, take a path of their own without the dispatcher (`plain_activation`). An op
goes from Python to torch's dispatcher, to Python for autograd, to the dispatcher again and to Python once more for the
kernels, and back the same way: that costs some 35 microseconds more than torch's own module, forward and backward
together, whatever the tensor's size. Compilers, transforms, modes and tensor subclasses need those steps, a plain
tensor does not. The remaining overhead over torch's module (1,000 elements, one core of an AMD EPYC of 2024,
microseconds):

    encode: tables looked up, codes allocated, the kernel called and run                   3
    multiply: the same, less torch's own backward                                          3
    torch.autograd.Function: its context and node, two calls from C++ to Python            5
    the module and this file: Python                                                       3
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from .. import ops
from ..backends.cpu import activation as cpu
from ..backends.cuda import activation as cuda
from ..backends.cuda import rounding as cuda_rounding
from ..backends.forwards import forward_of
from ..ops.arguments import check_dtype, checked, keys_of, refuse
from ..tensors.spec import as_dense, with_known_order, with_stride
from ..tensors.table_registry import table_of
from ..tensors.traits import is_plain
from . import transforms
from .following import FollowingTable
from .following import apply as follow
from .table_lookup import Rounding, resolve_key
from .transforms import keeps

__all__ = ["Swapper", "apply", "keeps", "key_for", "number", "resolve_key"]


_NUMBERS = (int, float, np.integer, np.floating)  # a tuple: torch 2.6's compiler cannot read a union


def number(name: str, value: object, infinite: bool = False) -> float:
    """Return the argument `name` as a float; raise `FewbitError` if it is not a number, is NaN, or must be finite."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise FewbitError(f"{name} must be a number, not {shown(value)}")
    if not math.isfinite(value) and not (infinite and math.isinf(value)):
        kind = "number" if infinite else "finite number"
        raise FewbitError(f"{name} must be a {kind}, not {shown(value)}")
    return float(value)


class Swapper(Protocol):
    """Moves codes to host memory and back: layers/offload.py."""

    def out(self, x: Tensor) -> Any:
        """Return `x` in host memory, a dataclass with its `host` tensor, or `x` itself if it is small."""
        ...

    def back(self, moved: Any) -> Tensor:
        """Return a moved tensor on its device."""
        ...


@torch.compiler.assume_constant_result
def key_for(
    dtype: torch.dtype,
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> str:
    """Return the key of the table for x of `dtype`; torch rounds parameters at which f' jumps before comparing."""
    if table is None:
        parameters = forward_of(function).as_compared(parameters, dtype)
    return resolve_key(function, parameters, bits, table, rounding)


def apply(
    x: Tensor,
    function: str,
    parameters: tuple[float, ...],
    key: str,
    inplace: bool = False,
    swapper: Swapper | None = None,
    following: FollowingTable | None = None,
) -> Tensor:
    """Return f(x), and save packed codes if a gradient is required.

    Args:
        x: any shape and layout; float64, float32, float16 or bfloat16 if a gradient is required.
        function: a name in `FORWARDS`; `parameters` are the values of its parameters.
        key: of a registered table.
        inplace: overwrite `x` with f(x) and return it, if torch has an in-place form.
        swapper: moves codes that are rounded at random to host memory.
        following: the table in place of `key`, but under torch.func.

    Raises:
        TypeError: a gradient is required and the dtype is not a floating-point one listed above; integers that torch's
            function does not accept.
    """
    overwrite = forward_of(function).inplace if inplace else None
    if not keeps(x):
        forward = overwrite or forward_of(function).call
        return checked(function, x, forward, x, *parameters)
    if following is not None and not transforms.are_active():
        y = follow(x, function, parameters, following)
        return y if overwrite is None else x.copy_(y)
    if _is_at_random(key):
        y = _rounded(x, function, parameters, key, swapper)
        return y if overwrite is None else x.copy_(y)
    if transforms.are_active():
        y = transforms.activation(x, function, parameters, key)
        return y if overwrite is None else x.copy_(y)
    if torch.compiler.is_compiling():
        # The compiler plans memory; it saves for the backward pass what the op returns.
        y = ops.activation(with_known_order(x), function, parameters, key)[0]
        return y if overwrite is None else x.copy_(y)
    if overwrite is None:
        if is_plain(x):
            return plain_activation(x, function, parameters, key)
        return ops.activation(x, function, parameters, key)[0]
    check_dtype(x, function)
    if x._base is not None and x._base.is_leaf and x._base.requires_grad:  # torch 2.6 lets a custom function do it
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    _Inplace.apply(x, key)  # the graph first: torch then refuses before x is overwritten
    with torch.no_grad():
        overwrite(x, *parameters)
    # Torch rebuilds the graph of a view after each write, when grad_fn is first read; register_hook, which FSDP calls,
    # does not read it and crashes (torch 2.6 to 2.13).
    _ = x.grad_fn
    return x


def plain_activation(x: Tensor, function: str, parameters: Sequence[float], key: str) -> Tensor:
    """Return f(x) and save packed codes, as `ops.activation` does, outside of torch.func, for an `x` that is plain."""
    return _record(x, function, parameters, key)


class fewbit_activation(torch.autograd.Function):
    """x -> f(x); named like the op, because graphs show the name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: str, parameters: Sequence[float], key: str) -> Tensor:
        """Return f(x) and save its codes."""
        check_dtype(x, function)
        y, packed = (cuda if x.is_cuda else cpu).activation(x, function, parameters, key)
        ctx.save_for_backward(packed)
        ctx.key = key
        ctx.stride = y.stride()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return gradient · q(x)."""
        (packed,) = ctx.saved_tensors
        grad = grads[0]
        if is_plain(grad) and not torch.is_grad_enabled():
            backend = cuda if grad.is_cuda else cpu
            return backend.multiply(with_stride(grad, ctx.stride), packed, ctx.key), None, None, None
        return ops.gradient(grad, packed, ctx.key, ctx.stride), None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Refuse forward mode."""
        refuse()


# What fewbit_activation.apply calls once it has looked for transforms of torch.func, a tenth of a forward pass: none is
# active where this path is taken, and no plain tensor has outlived one.
_record = super(torch.autograd.Function, fewbit_activation).apply  # pyright: ignore[reportAttributeAccessIssue]


@torch.compiler.assume_constant_result
def _is_at_random(key: str) -> bool:
    return table_of(key).kind == "stochastic"


def _rounded(x: Tensor, function: str, parameters: tuple[float, ...], key: str, swapper: Swapper | None) -> Tensor:
    """Return f(x), and save codes that are drawn at random: each element's level is f'(x) on average."""
    if transforms.are_active():
        raise FewbitError("tables of kind stochastic work under no transform of torch.func: use shared or interval")
    check_dtype(x, function)
    at_once = x.is_cuda and is_plain(x)
    return ActivationAtRandom.apply(with_known_order(x), function, parameters, key, swapper, at_once)


class ActivationAtRandom(torch.autograd.Function):
    """x -> f(x), with codes of a table of kind `stochastic`; on a GPU `at_once`, by one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: str,
        parameters: tuple[float, ...],
        key: str,
        swapper: Swapper | None,
        at_once: bool,
    ) -> Tensor:
        seeds = ops.draw_seeds(x, 1)
        if at_once:
            y, packed = cuda_rounding.activation(x, function, parameters, key, keys_of(seeds)[0])
        else:
            y = forward_of(function).call(x, *parameters)
            packed = ops.encode_at_random(with_stride(x, y.stride()), key, seeds)
        ctx.key, ctx.stride, ctx.swapper, ctx.moved = key, y.stride(), swapper, None
        if swapper is not None:
            packed = ops.to_host(packed) if torch.compiler.is_compiling() else swapper.out(packed)
        if not isinstance(packed, Tensor):
            ctx.moved, packed = replace(packed, host=None), packed.host
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (packed,) = ctx.saved_tensors
        if ctx.moved is not None:
            packed = ctx.swapper.back(replace(ctx.moved, host=packed))
        if torch.compiler.is_compiling():
            packed = packed if ctx.swapper is None else ops.to_device_of(packed, grads[0])
            return ops.multiply(grads[0], packed, ctx.key, ctx.stride), None, None, None, None, None
        return ops.gradient(grads[0], packed, ctx.key, ctx.stride), None, None, None, None, None


class _Inplace(torch.autograd.Function):
    """Graph of f(x) written over x: encodes x; the caller overwrites it afterwards."""

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
