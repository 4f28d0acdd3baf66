"""Activations by a table: f(x) and a few bits of f'(x) for each element.

    activation(x, function, parameters, table) -> (f(x), packed codes)       differentiable
    encode(x, table) -> packed codes
    encode_at_random(x, table, seed) -> packed codes      tables of kind stochastic; seed int64 (1,)
    multiply(grad, packed, table, stride) -> grad · q(x)
    draw_seeds(x, count) -> seeds                         int64 (count,) on the CPU or the GPU
    separate(x) -> [x₀, x₁, …]                            elements of a vector, each in memory of its own

Tables and functions are passed as strings (see tensors/levels.py, backends/torch_functions.py), so that
torch.compile sees constants and no table needs an op of its own. The packed code is an *output* of `activation`: only
then does torch.compile save it instead of x. Codes are in the memory order of the output; `stride` passes that order to
the backward pass.

Seeds are a tensor, so that ops that round are functions of their inputs and torch.compile sees the randomness.
`draw_seeds` takes the tensor to be rounded: compilers merge equal calls, and two tensors must not be rounded alike.
`separate` keeps the place of a seed out of the kernels that compilers write: kernels that differ in nothing else are
compiled once.

The same by the table in use of a `FollowingTable`, which a compiled graph knows by a handle (tensors/graphs.py):

    activation_following(x, function, parameters, following, bits, seed) -> f(x), packed codes, version
    multiply_following(grad, packed, version, following, bits, stride) -> grad · q(x)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ..backends.cuda import following as cuda
from ..backends.forwards import forward_of
from ..tensors.graphs import by_handle
from ..tensors.levels import table_of
from ..tensors.packing import packed_size
from ..tensors.spec import as_dense, with_stride
from .declare import (
    IN_MEMORY_ORDER,
    LIBRARY,
    ON_HOST,
    ONCE,
    PURE,
    Call,
    check_deterministic,
    check_dtype,
    check_packed,
    check_parameters,
    check_seeds,
    check_stride,
    declare,
    empty_codes,
    keys_of,
    refuse,
)


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


@declare("draw_seeds(Tensor x, int count) -> Tensor", "keys.draw", (*PURE, ONCE))
def draw_seeds(x: Tensor, count: int) -> Call:
    """Return the next seeds of the stream, int64 (count,) on the CPU or beside an `x` on a GPU, for rounding `x`."""
    device = x.device if x.device.type == "cuda" else "cpu"
    return Call(
        fake=lambda: torch.empty(count, dtype=torch.int64, device=device),
        run=lambda draw: draw(x, count),
    )


@declare("separate(Tensor x) -> Tensor[]")
def separate(x: Tensor) -> Call:
    """Return the elements of a vector, each in memory of its own."""
    return Call(
        fake=lambda: [x.new_empty(()) for _ in range(len(x))],
        run=lambda _: list(torch._foreach_add(x.unbind(), 0)) if len(x) else [],  # pyright: ignore[reportPrivateImportUsage]
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


# ---- by the table in use ---------------------------------------------------------------------------------------------


@declare(
    "activation_following(Tensor x, str function, float[] parameters, Tensor following, int bits, Tensor? seed)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(*IN_MEMORY_ORDER, *ON_HOST[1:], ONCE),  # not computed again, by another table
)
def activation_following(
    x: Tensor, function: str, parameters: Sequence[float], following: Tensor, bits: int, seed: Tensor | None
) -> Call:
    """Return f(x), codes in the memory of `bits` bits each, and the version of the table."""
    check_dtype(x, function)
    check_parameters(function, parameters)

    def run(_: None) -> tuple[Tensor, Tensor, Tensor]:
        key, version = _following_of(following).begin(x)
        if seed is not None:
            y = forward_of(function).call(x, *parameters)
            packed = encode_at_random(with_stride(x, y.stride()), key, seed)
        elif x.device.type == "cuda":  # whose other kernels are compiled for each table
            y, packed = cuda.activation(x, function, parameters, key)
        else:
            y, packed = activation(x, function, parameters, key)
        spare = packed_size(x.numel(), bits) - packed.numel()  # where the table in use takes fewer bits
        return y, torch.nn.functional.pad(packed, (0, spare)) if spare else packed, version

    return Call(
        fake=lambda: (
            *(forward_of(function).call(x, *parameters), empty_codes(x, x.numel(), bits)),
            torch.empty(2, dtype=torch.int64, device="cpu"),
        ),
        run=run,
    )


@declare(
    "multiply_following(Tensor grad, Tensor packed, Tensor version, Tensor following, int bits, SymInt[] stride)"
    " -> Tensor",
    tags=ON_HOST,
)
def multiply_following(
    grad: Tensor, packed: Tensor, version: Tensor, following: Tensor, bits: int, stride: Sequence[int]
) -> Call:
    """Return grad · q(x) by the table of that version."""
    check_dtype(grad, "multiply_following")
    check_packed(grad, "packed", packed, bits, grad.numel())
    check_stride(grad, stride)

    def run(_: None) -> Tensor:
        key = _following_of(following).end(version, grad)
        used = table_of(key).bits
        codes = packed[: packed_size(grad.numel(), used)]
        check_packed(grad, "packed", codes, used, grad.numel())  # of a table of more bits than the call says
        if grad.device.type == "cuda":
            return cuda.multiply(with_stride(grad, stride), codes, key)
        return multiply(grad, codes, key, stride)

    return Call(
        fake=lambda: torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device),
        run=run,
    )


def _following_of(handle: Tensor) -> Any:
    found = by_handle(handle)
    if found is None:
        raise FewbitError("a compiled model was converted back: compile it again")
    return found
