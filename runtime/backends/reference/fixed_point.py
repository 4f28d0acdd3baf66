"""Fixed-point quantization in plain torch: see quantizers/fixed_point.py for the mathematics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tensors.packing import pack, unpack
from ...tensors.spec import flat
from ...tensors.traits import has_float64, largest, smallest

# Below the least, a channel counts as constant; between them Δ, its inverse and 2^K of each are finite in float32.
LEAST_STEP, MOST_STEP = 2.0**-120, 2.0**118


@dataclass(frozen=True, eq=False)
class QuantParams:
    """Parameters of each channel's codes; all (C,).

    Attributes:
        origin: o, float32: start of the interval of code 2^{K−1}.
        step: Δ, float32; 0 in a channel that counts as constant.
        inverse: 1/Δ, float32, or 0.
        zero: z, int32, from 1 to 2^K − 1: the codes from here on are positive.
    """

    origin: Tensor
    step: Tensor
    inverse: Tensor
    zero: Tensor


def quant_params(scale: Tensor, shift: Tensor, bits: int) -> QuantParams:
    """Return the parameters of the codes under γ and β, (C,)."""
    γ, β = in_float64(scale).abs(), in_float64(shift)
    half = 1 << (bits - 1)
    Δ = (6 * γ / (2 * half)).clamp(max=MOST_STEP)
    varies = ~(Δ < LEAST_STEP)  # True for NaN, so that NaN propagates
    multiple = torch.where(varies, (β / Δ).floor(), torch.where(β == 0, 0, β.sign() * torch.inf))
    multiple = multiple + (half - multiple > 2 * half - 1)  # a negative range moves up: see quantizers/fixed_point.py
    limit = largest(torch.float32)
    origin = torch.where(varies, multiple * Δ, β).clamp(-limit, limit)
    zero = (half - multiple.nan_to_num()).clamp(1, 2 * half - 1)
    inverse = torch.where(varies, 1 / Δ, 0)
    step = torch.where(varies, Δ, 0)
    return QuantParams(*(part.to(scale.device) for part in (origin.float(), step.float(), inverse.float(), zero.int())))


def in_float64(channels: Tensor) -> Tensor:
    """Return numbers of channels (C,) in float64: on the CPU where their device has none."""
    return channels.double() if has_float64(channels.device) else channels.cpu().double()


def quantize(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Tensor:
    """Return the packed codes of the dense tensor `x`; element i in memory belongs to channel ⌊i/inner⌋ mod C."""
    return quantize_by(x, quant_params(scale, shift, bits), inner, bits)


def dequantize(packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, out: Tensor) -> None:
    """Write the dequantized codes to the dense tensor `out`."""
    dequantize_by(packed, quant_params(scale, shift, bits), inner, bits, out)


def quantize_by(x: Tensor, channels: QuantParams, inner: int, bits: int) -> Tensor:
    """Return the packed codes of the dense tensor `x` by the parameters of its channels."""
    half, top = 1 << (bits - 1), (1 << bits) - 1
    A = flat(x).float()
    channel = _channel(A, channels, inner)
    y = (A - channels.origin[channel]) * channels.inverse[channel] + half
    code = y.nan_to_num(0).clamp(0, top).int()
    zero = channels.zero[channel]
    return pack(torch.where(A > 0, code.maximum(zero), code.minimum(zero - 1)).to(torch.uint8), bits)


def dequantize_by(packed: Tensor, channels: QuantParams, inner: int, bits: int, out: Tensor) -> None:
    """Write the dequantized codes to the dense tensor `out`, by the parameters of its channels."""
    code = unpack(packed, bits, out.numel()).int()
    channel = _channel(code, channels, inner)
    middle = code.float() + (0.5 - (1 << (bits - 1)))
    values = channels.origin[channel] + middle * channels.step[channel]
    least, most = smallest(out.dtype), largest(out.dtype)
    positive = code >= channels.zero[channel]
    flat(out).copy_(torch.where(positive, values.clamp(least, most), values.clamp(-most, -least)))


def _channel(like: Tensor, channels: QuantParams, inner: int) -> Tensor:
    index = torch.arange(like.numel(), device=like.device)
    return index // inner % max(channels.zero.numel(), 1)
