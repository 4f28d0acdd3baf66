"""Activations by the table in use of a `FollowingTable`, which a compiled graph knows by a handle (tensors/graphs.py).

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
from ..tensors.packing import packed_size
from ..tensors.spec import with_stride
from ..tensors.table_registry import table_of
from .activation import activation, encode_at_random, multiply
from .arguments import check_dtype, check_packed, check_parameters, check_stride, empty_codes
from .declare import IN_MEMORY_ORDER, ON_HOST, ONCE, Call, declare


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
