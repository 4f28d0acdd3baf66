"""Parameters of a pre-activation layer's codes, channel by channel, for everything the backward pass needs.

`FixedPoint` defines the A₂ of a code: Ã₂ = o + (code + ½ − 2^{K−1})·Δ, positive from the code z on. Dividing by γ gives
the normalized input without the digits that Ã₂ − β would lose where |β| is large,

    Ã₁ = (o − β)/γ + (code + ½ − 2^{K−1})·6 sign(γ)/2^K.

A channel with γ = 0 outputs β for any input, so its codes would carry no information, and γ would never learn. There
the codes are of A₁ itself, in ±3, and the sign is that of β (`for_coding`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tensors.packing import unpack
from ...tensors.spec import channel_run, flat, with_stride
from ...tensors.traits import as_kind, is_abstract, widest_dtype
from .fixed_point import MOST_STEP, QuantParams, dequantize_by, in_float64, quant_params, quantize_by


@dataclass(frozen=True, eq=False)
class PreActQuantParams:
    """Parameters of every channel's codes.

    Attributes:
        channels: arguments of `FixedPoint`'s functions: o, Δ, 1/Δ and z. Where γ = 0, z gives all codes the sign of β.
        offset, slope: of Ã₁, float32 (C,).
        bits: K.
    """

    channels: QuantParams
    offset: Tensor
    slope: Tensor
    bits: int

    @property
    def count(self) -> int:
        """C."""
        return self.offset.numel()


def for_coding(γ: Tensor, β: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and shift with which codes are made: 1 and 0 where γ = 0, for the codes of A₁ itself."""
    flat = γ == 0
    return torch.where(flat, 1, γ), torch.where(flat, 0, β)


def preact_quant_params(γ: Tensor, β: Tensor, bits: int) -> PreActQuantParams:
    """Return the parameters of the codes under γ and β, (C,)."""
    c, device = quant_params(γ, β, bits), γ.device
    γ, β = in_float64(γ), in_float64(β)
    half, step = 1 << (bits - 1), 6.0 / (1 << bits)
    Δ = (step * γ.abs()).clamp(max=MOST_STEP)
    # ⌊β/Δ⌋Δ before rounding to float32: the offset is small, the rounding error of o may not be.
    multiple = (β / Δ).floor()
    multiple = multiple + (half - multiple > 2 * half - 1)
    offset = ((multiple * Δ - β) / γ).nan_to_num(0).clamp(-2 * step, 2 * step)
    slope = torch.where(γ < 0, -step, step).float().to(device)
    flat, positive = (γ == 0).to(device), (β > 0).to(device)
    zero = torch.where(flat, torch.where(positive, 0, 2 * half), c.zero).int()
    offset = torch.where(flat | (c.step == 0), 0, offset.float().to(device))
    return PreActQuantParams(QuantParams(c.origin, c.step, c.inverse, zero), offset, slope, bits)


# ---- the kernels' work, in plain torch -------------------------------------------------------------------------------


def compress(A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int) -> Tensor:
    """Return the packed code of the dense tensor `A` (N, C, …); where γ = 0, that of the normalized input `x`."""
    shape = [1, -1] + [1] * (A.dim() - 2)
    wide = torch.promote_types(A.dtype, torch.float32)  # rounded once, as kernels do, of 16-bit statistics too
    μ, r = (vector.to(wide).view(shape) for vector in (mean, inverse_deviation))
    normalized = ((x.to(wide) - μ) * r).to(A.dtype)
    coded = with_stride(torch.where((γ == 0).view(shape), normalized, A), A.stride())
    channels = preact_quant_params(*for_coding(γ, β), bits).channels
    return quantize_by(as_kind(coded, keep_positive=True), channels, channel_run(A.shape, A.stride(), 1), bits)


def encode(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> Tensor:
    """Return the result of `compress`, and turn `A` into its (leaky) ReLU, in place."""
    packed = compress(A, x, γ, β, mean, inverse_deviation, bits)
    torch.nn.functional.leaky_relu_(A, slope) if slope else A.relu_()
    return packed


def decode(packed: Tensor, γ: Tensor, β: Tensor, bits: int, slope: float, out: Tensor) -> Tensor:
    """Return Ã₃, in the form of the dense tensor `out`, which is overwritten."""
    meaning = preact_quant_params(γ, β, bits)
    dequantize_by(packed, meaning.channels, channel_run(out.shape, out.stride(), 1), bits, out)
    below = out
    if slope:  # times what is not rounded yet, as kernels do
        below = out.to(torch.promote_types(out.dtype, torch.float32))
        dequantize_by(packed, meaning.channels, channel_run(out.shape, out.stride(), 1), bits, below)
    code = unpack(packed, bits, out.numel()).int()
    positive = torch.empty_strided(out.shape, out.stride(), dtype=torch.bool, device=out.device)
    flat(positive).copy_(code >= meaning.channels.zero[_channel(out, γ)])
    return torch.where(positive, out, (slope * below).to(out.dtype) if slope else 0)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the shape and layout of the dense ∇A₃ `gradient`, of β and of γ, (C,).

    Sums are in float64 where the device has it.

    Args:
        packed, γ, β, bits, slope: the codes and their parameters.
        gradient: ∇A₃; returned as it is unless `into_input`.
        inverse_deviation: (σ² + ε)^{−1/2}, (C,).
        by_batch: whether mean and variance are those of the batch.
        into_input: whether the input needs a gradient.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    meaning, channel = preact_quant_params(γ, β, bits), _channel(gradient, γ)
    g, code = flat(gradient).to(wide), unpack(packed, bits, gradient.numel())
    g = torch.where(code.int() >= meaning.channels.zero[channel], g, g * slope if slope else 0)
    middle = code.to(wide) + (0.5 - (1 << (bits - 1)))
    normal = meaning.offset[channel] + middle * meaning.slope[channel]
    widest = widest_dtype(g.device)
    totals = torch.zeros(2, meaning.count, dtype=widest, device=g.device)
    totals[0].index_add_(0, channel, g.to(widest))
    totals[1].index_add_(0, channel, (g * normal).to(widest))
    dβ, dγ = totals
    if not into_input:
        return gradient, dβ, dγ
    # The input's gradient is s∘(∇A₂ − p − q∘Ã₁).
    s = (γ.to(widest) * inverse_deviation.to(widest)).to(wide)
    p, q = (totals / (g.numel() // meaning.count) if by_batch else torch.zeros_like(totals)).to(wide)
    values = (g - p[channel] - q[channel] * normal) * s[channel]
    if is_abstract(gradient):
        return gradient, dβ, dγ  # kernels write to its memory
    dx = torch.empty_like(gradient)
    flat(dx).copy_(values)
    return dx, dβ, dγ


def _channel(x: Tensor, γ: Tensor) -> Tensor:
    """Return the channel of each element of the dense tensor `x`, in memory order."""
    index = torch.arange(x.numel(), device=x.device)
    return index // channel_run(x.shape, x.stride(), 1) % max(γ.numel(), 1)
