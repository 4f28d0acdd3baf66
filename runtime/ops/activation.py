"""Activations by a table: f(x) and a few bits of f'(x) for each element.

    activation(x, function, parameters, table) -> (f(x), packed codes)       differentiable
    encode(x, table) -> packed codes
    encode_at_random(x, table, seed) -> packed codes      tables of kind stochastic; seed int64 (1,)
    multiply(grad, packed, table, stride) -> grad · q(x)

Tables and functions are passed as strings (see tensors/table_registry.py, backends/torch_functions.py), so that
torch.compile sees constants and no table needs an op of its own. The packed code is an *output* of `activation`: only
then does torch.compile save it instead of x. Codes are in the memory order of the output; `stride` passes that order to
the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ..backends.forwards import forward_of
from ..tensors.spec import as_dense, with_stride
from ..tensors.table_registry import table_of
from .arguments import (
    check_deterministic,
    check_dtype,
    check_packed,
    check_parameters,
    check_seeds,
    check_stride,
    empty_codes,
    keys_of,
    refuse,
)
from .declare import IN_MEMORY_ORDER, LIBRARY, Call, declare


@declare(
    "activation(Tensor x, str function, float[] parameters, str table) -> (Tensor, Tensor)",
    "activation.activation",
    IN_MEMORY_ORDER,
)
def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> Call:
    """Return f(x) and the packed codes of f'(x)."""
    check_dtype(x, function)
    check_parameters(function, parameters)
    check_deterministic("activation", table)
    return Call(
        fake=lambda: (forward_of(function).call(x, *parameters), empty_codes(x, x.numel(), table_of(table).bits)),
        run=lambda kernel: kernel(x, function, parameters, table),
    )


@declare("encode(Tensor x, str table) -> Tensor", "activation.encode", IN_MEMORY_ORDER)
def encode(x: Tensor, table: str) -> Call:
    """Return the packed codes of f'(x)."""
    check_dtype(x, "encode")
    check_deterministic("encode", table)
    return Call(
        fake=lambda: empty_codes(x, x.numel(), table_of(table).bits),
        run=lambda kernel: kernel(as_dense(x), table),
    )


@declare(
    "encode_at_random(Tensor x, str table, Tensor seed) -> Tensor",
    "rounding.encode_at_random",
    IN_MEMORY_ORDER,
)
def encode_at_random(x: Tensor, table: str, seed: Tensor) -> Call:
    """Return the packed codes of f'(x), rounded at random."""
    check_dtype(x, "encode_at_random")
    check_seeds(x, seed, 1)
    if table_of(table).kind != "stochastic":
        raise FewbitError(f"encode_at_random takes tables of kind stochastic, not {table_of(table).kind}")
    return Call(
        fake=lambda: empty_codes(x, x.numel(), table_of(table).bits),
        run=lambda kernel: kernel(as_dense(x), table, keys_of(seed)[0]),
    )


@declare(
    "multiply(Tensor grad, Tensor packed, str table, SymInt[] stride) -> Tensor",
    "activation.multiply",
    IN_MEMORY_ORDER,
)
def multiply(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Call:
    """Return grad · q(x); `stride` is that of the output, which is dense."""
    check_dtype(grad, "multiply")
    check_packed(grad, "packed", packed, table_of(table).bits, grad.numel())
    check_stride(grad, stride)
    return Call(
        fake=lambda: torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device),
        run=lambda kernel: kernel(with_stride(grad, stride), packed, table),
    )


# ---- the gradient ----------------------------------------------------------------------------------------------------


def gradient(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
    """Return the gradient of an activation's input; refuse `create_graph=True`.

    Refusing later, when the result is differentiated, would be wrong: a result without a graph counts as a constant,
    and the Hessian would come out as 0.
    """
    if torch.is_grad_enabled():
        refuse()
    return multiply(grad, packed, table, stride)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, packed = output
    ctx.save_for_backward(packed)
    ctx.table = inputs[3]
    ctx.stride = y.stride()
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)  # no zeros for the codes, which have no gradient


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None, None]:
    (packed,) = ctx.saved_tensors
    return gradient(grad, packed, ctx.table, ctx.stride), None, None, None


torch.library.register_autograd(activation, _backward, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(multiply, refuse, lib=LIBRARY)
