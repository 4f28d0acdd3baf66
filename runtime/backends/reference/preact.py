"""Parameters of a pre-activation layer's codes, channel by channel, for everything the backward pass needs.

`FixedPoint` defines the A₂ of a code: Ã₂ = o + (code + ½ − 2^{K−1})·Δ, positive from the code z on. Dividing by γ gives
the normalised input without the digits that Ã₂ − β would lose where |β| is large,

    Ã₁ = (o − β)/γ + (code + ½ − 2^{K−1})·6 sign(γ)/2^K.

A channel with γ = 0 outputs β for any input, so its codes would carry no information, and γ would never learn. There
the codes are of A₁ itself, in ±3, and the sign is that of β (`for_coding`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .fixed_point import MOST_STEP, QuantParams, quant_params


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
    c = quant_params(γ, β, bits)
    γ, β = γ.double(), β.double()
    half, step = 1 << (bits - 1), 6.0 / (1 << bits)
    Δ = (step * γ.abs()).clamp(max=MOST_STEP)
    # ⌊β/Δ⌋Δ before rounding to float32: the offset is small, the rounding error of o may not be.
    multiple = (β / Δ).floor()
    multiple = multiple + (half - multiple > 2 * half - 1)
    offset = ((multiple * Δ - β) / γ).nan_to_num(0).clamp(-2 * step, 2 * step)
    flat = γ == 0
    zero = torch.where(flat, torch.where(β > 0, 0, 2 * half), c.zero).int()
    return PreActQuantParams(
        QuantParams(c.origin, c.step, c.inverse, zero),
        torch.where(flat | (c.step == 0), 0, offset).float(),
        torch.where(γ < 0, -step, step).float(),
        bits,
    )
