"""Fused CUDA kernels of a pre-activation layer: the operations of cpu/preact.py, on torch's stream and device.

A step of a deep network is launched faster than it is computed only with few launches and no synchronisation: a layer
takes six of fewbit's, forward and backward, besides torch's own batch normalization and linear part.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tensors.packing import packed_size
from ...tensors.spec import channel_run
from .codegen.fixed_point import WARPS_PER_BLOCK
from .fixed_point import launch, table
from .launching import aligned, serves

__all__ = ["decode", "encode", "serves", "through_normalization"]

# A channel's elements are divided among this many warps, all channels together, but each gets at least this many.
_WARPS, _LEAST_SHARE = 8192, 1024


def encode(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> Tensor:
    """Return the packed code of the dense tensor `A` (N, C, …), and turn `A` into its (leaky) ReLU, in place.

    Args:
        A: A₂, overwritten.
        x: the layer's input, laid out as `A`: where γ = 0, codes are of the normalized input.
        γ, β, mean, inverse_deviation: (C,).
        bits: K.
        slope: of the leaky ReLU.
    """
    n = A.numel()
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device=A.device)
    rows, μ, r = table(γ, β, bits), _single(mean), _single(inverse_deviation)
    memory = (A.data_ptr(), x.data_ptr(), packed.data_ptr(), rows.data_ptr(), μ.data_ptr(), r.data_ptr())
    launch("encode", A, bits, n, *memory, *_shape(A), _bits(slope))
    return packed


def decode(packed: Tensor, γ: Tensor, β: Tensor, bits: int, slope: float, out: Tensor) -> None:
    """Write Ã₃, the (leaky) ReLU of the dequantized codes, to the dense tensor `out`."""
    packed, rows = aligned(packed), table(γ, β, bits)
    memory = (packed.data_ptr(), out.data_ptr(), rows.data_ptr())
    launch("decode", out, bits, out.numel(), *memory, *_shape(out), _bits(slope))


def through_normalization(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    gradient: Tensor,
    inverse_deviation: Tensor,
    by_batch: bool,
    into_input: bool,
) -> Tensor:
    """Return Σ ∇A₂, Σ Ã₁∘∇A₂ of each channel, float32 (2, C); make ∇A₃ the input's gradient: see cpu/preact.py."""
    packed = aligned(packed)
    n, inner, C = _shape(gradient)
    elements = n // C
    shares = max(1, min(_WARPS // C, elements // _LEAST_SHARE))
    rows, scale, r = table(γ, β, bits), γ.double().contiguous(), _single(inverse_deviation)
    sums = torch.empty(shares, 2, C, dtype=torch.float32, device=gradient.device)
    results = torch.empty(5, C, dtype=torch.float32, device=gradient.device)
    memory = (packed.data_ptr(), gradient.data_ptr(), rows.data_ptr())
    work = C * shares
    launch(
        "sums",
        gradient,
        bits,
        work,
        *memory,
        sums.data_ptr(),
        shares,
        n,
        inner,
        C,
        _bits(slope),
        per_block=WARPS_PER_BLOCK,
    )
    vectors = (sums.data_ptr(), results.data_ptr(), scale.data_ptr(), r.data_ptr())
    launch("finish", gradient, bits, C, *vectors, shares, elements, int(by_batch), C, per_block=WARPS_PER_BLOCK * 32)
    if into_input:
        launch("normalize", gradient, bits, n, *memory, results.data_ptr(), n, inner, C, _bits(slope))
    return results[:2]


def _shape(x: Tensor) -> tuple[int, int, int]:
    """Return the number of elements, of contiguous elements of a channel, and of channels."""
    return x.numel(), channel_run(x.shape, x.stride(), 1), x.shape[1]


def _single(vector: Tensor) -> Tensor:
    return vector.float().contiguous()


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
