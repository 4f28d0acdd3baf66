"""Pre-activation layers (BLPA, equations 6 to 8).

preact_encode(A, x, γ, β, mean, inverse_deviation, bits, slope) -> packed, A₃
preact_decode(packed, γ, β, bits, slope, shape, stride, dtype) -> Ã₃
preact_backward(packed, γ, β, bits, slope, gradient, inverse_deviation, by_batch, into_input) -> ∇x, ∇β, ∇γ
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..backends.reference import preact as reference
from ..tensors.packing import packed_size
from ..tensors.spec import as_dense, is_dense, with_stride
from ..tensors.traits import DTYPES, KINDS
from ..tensors.validation import check_part, shown_part
from .declare import IN_MEMORY_ORDER, Call, declare, empty_codes

_CODES = "Tensor packed, Tensor gamma, Tensor beta, int bits, float slope"


@declare(
    "preact_encode(Tensor A, Tensor x, Tensor gamma, Tensor beta, Tensor mean, Tensor inverse_deviation, int bits,"
    " float slope) -> (Tensor, Tensor)",
    "preact",
    IN_MEMORY_ORDER,
)
def preact_encode(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> Call:
    """Return the packed code of A₂ and its (leaky) ReLU."""
    if A.dim() < 2 or A.dtype not in DTYPES or x.dtype not in DTYPES or A.shape != x.shape or A.device != x.device:
        raise FewbitError(
            f"preact_encode: A and x are floating-point tensors of one shape, not {shown_part(A)} and {shown_part(x)}"
        )
    vectors = (γ, β, mean, inverse_deviation)
    _check_channels("preact_encode", A.shape[1], A.device, vectors, bits)

    def run(backend: Any) -> tuple[Tensor, Tensor]:
        activated = as_dense(A).clone()
        given = with_stride(x.to(A.dtype), activated.stride())
        packed = _kernels(backend, activated).encode(activated, given, *vectors, bits, slope)
        return packed, activated

    return Call(fake=lambda: (empty_codes(A, A.numel(), bits), torch.empty_like(A)), run=run)


@declare(f"preact_decode({_CODES}, SymInt[] shape, SymInt[] stride, ScalarType dtype) -> Tensor", "preact")
def preact_decode(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Call:
    """Return Ã₃, the (leaky) ReLU of the dequantized codes."""
    _check_codes("preact_decode", packed, (γ, β), bits, shape, stride, dtype)

    def empty() -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=packed.device)

    def run(backend: Any) -> Tensor:
        out = empty()
        found = _kernels(backend, out).decode(packed, γ, β, bits, slope, out)
        return out if found is None else found

    return Call(fake=empty, run=run)


@declare(
    f"preact_backward({_CODES}, Tensor gradient, Tensor inverse_deviation, bool by_batch, bool into_input)"
    " -> (Tensor, Tensor, Tensor)",
    "preact",
    IN_MEMORY_ORDER,
)
def preact_backward(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    gradient: Tensor,
    inverse_deviation: Tensor,
    by_batch: bool,
    into_input: bool,
) -> Call:
    """Return the gradients of the layer's input, which has no elements unless `into_input`, of β and of γ."""
    form = as_dense(gradient)
    vectors = (γ, β, inverse_deviation)
    _check_codes("preact_backward", packed, vectors, bits, form.shape, form.stride(), form.dtype)

    def fake() -> tuple[Tensor, Tensor, Tensor]:
        dx = torch.empty_like(gradient) if into_input else gradient.new_empty(0)
        dβ, dγ = (γ.new_empty(γ.shape, dtype=torch.float32) for _ in range(2))
        return dx, dβ, dγ

    def run(backend: Any) -> tuple[Tensor, Tensor, Tensor]:
        g = form.clone()
        results = _kernels(backend, g).through_normalization(
            *(packed, γ, β, bits, slope, g, inverse_deviation, by_batch, into_input)
        )
        *dx, dβ, dγ = results  # kernels write the input's gradient over g, plain torch returns it first
        dx = (dx[0] if dx else g) if into_input else g.new_empty(0)
        return dx, dβ.float().clone(), dγ.float().clone()

    return Call(fake=fake, run=run)


def _kernels(backend: Any, x: Tensor) -> Any:
    """Return the backend's file if it serves `x`, or plain torch's."""
    serves = getattr(backend, "serves", None)
    return backend if x.dtype in KINDS and (serves is None or serves(x)) else reference


def _check_codes(
    op: str,
    packed: Tensor,
    vectors: Sequence[Tensor],
    bits: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Raise FewbitError unless `packed` holds codes of a dense tensor of this form, whose channels have `vectors`."""
    if dtype not in DTYPES or len(shape) < 2 or len(stride) != len(shape) or not is_dense(shape, stride):
        raise FewbitError(f"{op}: codes are of a dense floating-point tensor with channels, not {list(shape)}")
    _check_channels(op, shape[1], packed.device, vectors, bits)
    check_part(op, "packed", packed, torch.uint8, (packed_size(math.prod(shape), bits),), packed.device)


def _check_channels(op: str, channels: int, device: torch.device, vectors: Sequence[Tensor], bits: int) -> None:
    check_integer("bits", bits, 1, 8)
    if channels == 0:
        raise FewbitError(f"{op}: a tensor with channels is expected, not one of 0 channels")
    for vector in vectors:
        if vector.shape != (channels,) or not vector.is_floating_point() or vector.device != device:
            raise FewbitError(f"{op}: vectors are floating-point ({channels},) on {device}, not {shown_part(vector)}")
