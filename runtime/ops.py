"""Every op of the runtime: its schema, what it does on each device, its fake and its gradient, on one page.

    activation(x, function, parameters, table) -> (f(x), packed codes)       differentiable
    encode(x, table) -> packed codes
    multiply(grad, packed, table, stride) -> grad · q(x)

Tables and functions travel as strings (see prepared.py, forwards.py), so that torch.compile sees constants and no table
needs an op of its own. The packed code is an *output* of `activation`: only so does torch.compile keep it, and not x.
Codes lie in the memory order of the output; `stride` carries that order to the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..tables import FewbitError
from .backends.cpu import activation as cpu
from .backends.cuda import activation as cuda
from .backends.reference import activation as reference
from .backends.torch_functions import forward_of
from .tensors.layout import as_dense, is_dense, with_stride
from .tensors.packing import packed_size
from .tensors.table_registry import DTYPES, table_of

NAMESPACE = "fewbit"

# Codes lie in the memory order that was seen while tracing, so the compiler must keep it; torch 2.6 has to be told.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "activation(Tensor x, str function, float[] parameters, str table) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define("encode(Tensor x, str table) -> Tensor", tags=_TAGS)
_library.define(
    "multiply(Tensor grad, Tensor packed, str table, SymInt[] stride) -> Tensor",
    tags=_TAGS,
)

activation = torch.ops.fewbit.activation.default
encode = torch.ops.fewbit.encode.default
multiply = torch.ops.fewbit.multiply.default


# ---- devices: plain torch serves any, Numba the CPU, generated kernels CUDA ------------------------------------------


def _activation(
    x: Tensor, function: str, parameters: Sequence[float], table: str, *, backend: Any = reference
) -> tuple[Tensor, Tensor]:
    check_dtype(x, function)
    check_parameters(function, parameters)
    return backend.activation(x, function, parameters, table)


def _encode(x: Tensor, table: str, *, backend: Any = reference) -> Tensor:
    check_dtype(x, "encode")
    return backend.encode(as_dense(x), table)


def _multiply(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int], *, backend: Any = reference) -> Tensor:
    check_codes(grad, packed, table, stride)
    return backend.multiply(with_stride(grad, stride), packed, table)


for _backend, _key in ((reference, "CompositeExplicitAutograd"), (cpu, "CPU"), (cuda, "CUDA")):
    _library.impl("activation", partial(_activation, backend=_backend), _key)
    _library.impl("encode", partial(_encode, backend=_backend), _key)
    _library.impl("multiply", partial(_multiply, backend=_backend), _key)


# ---- shapes alone ----------------------------------------------------------------------------------------------------


@torch.library.register_fake(activation, lib=_library)
def _(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    check_dtype(x, function)
    check_parameters(function, parameters)
    return forward_of(function).call(x, *parameters), _fake_encode(x, table)


@torch.library.register_fake(encode, lib=_library)
def _fake_encode(x: Tensor, table: str) -> Tensor:
    check_dtype(x, "encode")
    return x.new_empty(packed_size(x.numel(), table_of(table).bits), dtype=torch.uint8)


@torch.library.register_fake(multiply, lib=_library)
def _(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
    check_codes(grad, packed, table, stride)
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, packed = output
    ctx.save_for_backward(packed)
    ctx.table = inputs[3]
    ctx.stride = y.stride()


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None, None]:
    (packed,) = ctx.saved_tensors
    return gradient(grad, packed, ctx.table, ctx.stride), None, None, None


def gradient(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
    """Return what the backward pass of an activation returns; refuses `create_graph=True`.

    It would be wrong to wait until the result is differentiated: a result without a graph counts as a constant, and
    the Hessian would come out as 0.
    """
    if torch.is_grad_enabled():
        refuse()
    return multiply(grad, packed, table, stride)


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: what was asked for takes more than the codes hold."""
    raise RuntimeError(
        "fewbit activations have no second derivative (create_graph=True) and no forward mode: "
        "the codes keep f' alone; use torch's own activation here"
    )


torch.library.register_autograd(activation, _backward, setup_context=_save, lib=_library)
torch.library.register_autograd(multiply, refuse, lib=_library)


# ---- arguments: what would make a kernel read or write out of bounds is refused, on every device and for fakes -------


def check_codes(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> None:
    """Raise FewbitError unless `packed` are as many codes of the table as `grad` has elements, and `stride` is dense.

    Raises:
        TypeError: the ops do not take the dtype of `grad`.
    """
    check_dtype(grad, "multiply")
    check_packed(grad, "packed", packed, table_of(table).bits, grad.numel())
    if len(stride) != grad.dim():
        raise FewbitError(f"the stride has {grad.dim()} numbers, one a dimension of the gradient, not {len(stride)}")
    concrete = all(type(number) is int for number in (*grad.shape, *stride))
    if concrete and not is_dense(grad.shape, stride):
        raise FewbitError(f"the stride {tuple(stride)} is not that of a dense tensor of shape {tuple(grad.shape)}")


def check_packed(like: Tensor, name: str, packed: Tensor, bits: int, n: Any) -> None:
    """Raise FewbitError unless `packed` are `n` codes of `bits` bits on the device of `like`; 0 bits are none."""
    size, given = packed_size(n, bits), packed.shape
    concrete = all(type(number) is int for number in (size, *given))  # a compiler may not know the sizes
    wrong_size = given != (size,) if concrete else len(given) != 1
    if packed.dtype != torch.uint8 or wrong_size or packed.device != like.device or packed.layout != torch.strided:
        raise FewbitError(
            f"{n} codes of {bits} bits take {size} bytes: {name} is uint8 ({size},) on {like.device}, not "
            f"{str(packed.dtype).removeprefix('torch.')} {tuple(given)} on {packed.device}"
        )


def check_parameters(function: str, parameters: Sequence[float]) -> None:
    """Raise FewbitError unless `parameters` are as many as the function has."""
    names = [name for name, _ in forward_of(function).parameters]
    if len(parameters) != len(names):
        accepted = ", ".join(names) or "no parameters"
        raise FewbitError(f"{function} takes {accepted}, not {len(parameters)} numbers")


def checked(function: str, x: Any, forward: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``forward(*arguments)``, torch's own; raise the TypeError of `check_dtype` for integers that it refuses.

    Args:
        function: its name, for the message.
        x: which of the arguments may be integers or booleans.
    """
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or torch.compiler.is_compiling():
        return forward(*arguments)
    try:
        return forward(*arguments)
    except RuntimeError as error:  # NotImplementedError is one
        try:
            check_dtype(x, function)
        except TypeError as refused:
            raise refused from error
        raise


def check_dtype(x: Tensor, function: str) -> None:
    """Raise TypeError if the ops do not take the dtype of `x`."""
    if x.dtype not in DTYPES:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"fewbit.{function} takes {accepted}, not {str(x.dtype).removeprefix('torch.')}")
