"""Every op of the runtime: its schema, what it does on each device, its fake and its gradient, on one page.

    activation(x, function, parameters, table) -> (f(x), packed codes)       differentiable
    encode(x, table) -> packed codes
    multiply(grad, packed, table, stride) -> grad · q(x)

Tables and functions travel as strings (see prepared.py, forwards.py), so that torch.compile sees constants and no table
needs an op of its own. The packed code is an *output* of `activation`: only so does torch.compile keep it, and not x.
Codes lie in the memory order of the output; `stride` carries that order to the backward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from .backends import cpu, cuda, reference
from .forwards import forward_of
from .layout import as_dense, with_stride
from .packing import packed_size
from .prepared import DTYPES, table_of

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
    return backend.activation(x, function, parameters, table)


def _encode(x: Tensor, table: str, *, backend: Any = reference) -> Tensor:
    check_dtype(x, "encode")
    return backend.encode(as_dense(x), table)


def _multiply(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int], *, backend: Any = reference) -> Tensor:
    return backend.multiply(with_stride(grad, stride), packed, table)


for _backend, _key in ((reference, "CompositeExplicitAutograd"), (cpu, "CPU"), (cuda, "CUDA")):
    _library.impl("activation", partial(_activation, backend=_backend), _key)
    _library.impl("encode", partial(_encode, backend=_backend), _key)
    _library.impl("multiply", partial(_multiply, backend=_backend), _key)


# ---- shapes alone ----------------------------------------------------------------------------------------------------


@torch.library.register_fake(activation, lib=_library)
def _(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    check_dtype(x, function)
    return forward_of(function).call(x, *parameters), _fake_encode(x, table)


@torch.library.register_fake(encode, lib=_library)
def _fake_encode(x: Tensor, table: str) -> Tensor:
    check_dtype(x, "encode")
    return x.new_empty(packed_size(x.numel(), table_of(table).bits), dtype=torch.uint8)


@torch.library.register_fake(multiply, lib=_library)
def _(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
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


def check_dtype(x: Tensor, function: str) -> None:
    """Raise TypeError if the ops do not take the dtype of `x`."""
    if x.dtype not in DTYPES:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"fewbit.{function} takes {accepted}, not {str(x.dtype).removeprefix('torch.')}")
