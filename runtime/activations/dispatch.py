"""Few-bit activations: the base of their modules, and the path of a call: look up the table, compute f(x), save codes.

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
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from .. import ops
from ..backends.cpu import activation as cpu
from ..backends.cuda import activation as cuda
from ..backends.cuda import rounding as cuda_rounding
from ..backends.forwards import as_autocast, forward_of
from ..ops.declare import check_dtype, checked, keys_of, refuse
from ..tensors.levels import register_table, register_unpickled, table_of
from ..tensors.spec import as_dense, with_known_order, with_stride
from ..tensors.traits import DTYPES, is_dense, is_plain
from .arguments import Rounding, resolve_key, resolve_table
from .following import FollowingTable
from .following import apply as follow

# ---- under torch.func ------------------------------------------------------------------------------------------------
#
# grad, vjp, vmap, jacrev and their compositions. `torch.func.grad` always builds a graph of the gradient, so refusing
# it immediately, as `backward` does with ``create_graph=True``, is not possible. Instead the gradient depends on a
# `link` to x: an empty tensor that keeps nothing alive, and whose own derivative is refused.
#
# Codes are in row-major order here: the strides of a batched tensor are not those of each sample.


def are_active() -> bool:
    """Return whether this call is inside a transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


def keeps(x: Tensor) -> bool:
    """Return whether a gradient of f(x) is required, and codes must be saved: nested and sparse tensors have none."""
    if not torch.is_grad_enabled() or not is_dense(x):
        return False
    if are_active():
        while not x.requires_grad and is_functorch_wrapped_tensor(x):  # batched tensors hide it
            x = get_unwrapped(x)
    return x.requires_grad


class _UnderTransforms(torch.autograd.Function):
    """x -> f(x), packed codes, link."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: str, parameters: Sequence[float], key: str) -> tuple[Tensor, Tensor, Tensor]:
        y = forward_of(function).call(x, *parameters)
        return y, ops.encode(x.reshape(-1), key), torch.zeros_like(x.reshape(-1)[:0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, packed, link = output
        ctx.mark_non_differentiable(packed)
        ctx.save_for_backward(packed, link)
        ctx.key = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        packed, link = ctx.saved_tensors
        return _Gradient.apply(grads[0], packed, link, ctx.key), None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse()


class _Gradient(torch.autograd.Function):
    """gradient, codes -> gradient · q(x); the link records that it depends on x as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, packed: Tensor, link: Tensor, key: str) -> Tensor:
        return ops.multiply(grad.reshape(-1), packed, key, (1,)).reshape(grad.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        refuse()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse()


# ---- calls -----------------------------------------------------------------------------------------------------------

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
    x = as_autocast(x, function)
    if following is not None and not are_active():
        y = follow(x, function, parameters, following)
        return y if overwrite is None else x.copy_(y)
    if _is_at_random(key):
        y = _rounded(x, function, parameters, key, swapper)
        return y if overwrite is None else x.copy_(y)
    if are_active():
        y = _UnderTransforms.apply(x, function, parameters, key)[0]
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
    if are_active():
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
        """Return f(x) and save its codes, in host memory if there is a `swapper`."""
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
        """Return gradient · q(x)."""
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


# ---- modules ---------------------------------------------------------------------------------------------------------

# torch.fx cannot trace control flow that depends on values, so it records this call as one node.
fx.wrap("apply")


class FewBitActivation(nn.Module):
    """Base class of the few-bit activations: torch's function, its parameters and a table.

    Attributes:
        inplace: whether the input is overwritten.
        swapper: where codes rounded at random wait for the backward pass; None: on their device.
        following: the table if it follows the training (`convert` with `adapt`).
    """

    inplace: bool
    swapper: Swapper | None = None
    following: FollowingTable | None = None
    # Which arguments the `repr` of torch's module shows: see ActivationRow.torch_repr.
    _shown: ClassVar[Literal["named", "values", "nothing"]] = "named"

    def __init__(
        self,
        function: str,
        arguments: dict[str, float] | None = None,
        inplace: bool = False,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__()
        self.inplace = inplace
        self._arguments = arguments or {}
        self._function = function
        forward = forward_of(function)
        self._parameters_of_function = tuple(number(n, value, forward.bounds) for n, value in self._arguments.items())
        self._table = resolve_table(function, self._parameters_of_function, bits, table, rounding)
        self._key = register_table(self.table)
        rounded = {forward.as_compared(self._parameters_of_function, dtype) for dtype in DTYPES}
        self._one_table = table is not None or len(rounded) == 1

    @property
    def table(self) -> Table:
        """The table that replaces the derivative (of float64, where torch rounds a parameter for other dtypes)."""
        return self._table if self.following is None else self.following.table

    @property
    def bits(self) -> int:
        """Bits saved for each element; fewer than requested if fewer represent the derivative exactly."""
        return self.table.bits

    @property
    def rounding(self) -> Rounding:
        """``stochastic`` if the gradient is f'(x) on average, ``deterministic`` if x alone determines it."""
        return "stochastic" if self.table.kind == "stochastic" else "deterministic"

    @property
    def activation(self) -> str:
        """The compiler's name of the function, whatever table is used for it: ``softplus(beta=2)``.

        For a callable, which the compiler does not name, ``callable:NAME`` and a number.
        """
        return forward_of(self._function).activation_name(self._function, self._parameters_of_function)

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); saves ⌈n/8⌉·bits bytes if a gradient is required."""
        parameters = self._parameters_of_function
        key = self._key if self._one_table else key_for(input.dtype, self._function, parameters)
        return apply(input, self._function, parameters, key, self.inplace, self.swapper, self.following)

    def stop_following(self) -> None:
        """Keep the table in use from now on."""
        if self.following is not None:
            self._table, self.following = self.following.table, None
            self._key = register_table(self._table)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = register_unpickled(self)  # the module may be unpickled in another process
        parameters = vars(self).get("_parameters_of_function")
        if not isinstance(parameters, tuple) or not all(isinstance(value, int | float) for value in parameters):
            raise FewbitError(f"a pickled {type(self).__name__} holds numbers as parameters, not {shown(parameters)}")

    def _torch_repr(self) -> list[str]:
        """Return the arguments as the `repr` of torch's module shows them."""
        if self._shown == "nothing":
            return []
        if self._shown == "values":
            return [f"{value}" for value in self._arguments.values()]
        shown = [f"{name}={value}" for name, value in self._arguments.items()]
        return [*shown, "inplace=True"] if self.inplace else shown

    def extra_repr(self) -> str:
        """Return torch's own arguments and the number of bits."""
        rounding = [] if self.rounding == "deterministic" else ["rounding='stochastic'"]
        return ", ".join([*self._torch_repr(), f"bits={self.bits}", *rounding])
