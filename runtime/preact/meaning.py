"""What the codes of a pre-activation layer mean, channel by channel, for everything that the backward pass asks.

`FixedPoint` says which A₂ a code stands for: Ã₂ = o + (code + ½ − 2^{K−1})·Δ, positive from the code z on. Dividing by
γ gives what was normalised without the digits that Ã₂ − β would lose where |β| is large,

    Ã₁ = (o − β)/γ + (code + ½ − 2^{K−1})·6 sign(γ)/2^K.

A channel with γ = 0 puts out β whatever goes in, so its codes would tell nothing, and γ would never learn. There
the codes are of A₁ itself, in ±3, and the sign is that of β (`for_coding`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantizers.fixed_point import MOST_STEP, Channels, channels_of
from . import cpu
from .cpu import INVERSE, ORIGIN, STEP, ZERO

# Kernels do runs of a channel's elements. Where these are shorter, as in channels-last memory, they walk through a
# table that has a column for each element, over and over.
_LEAST_RUN = 128
_LEAST_COLUMNS = 1024


@dataclass(frozen=True, eq=False)
class Meaning:
    """Parameters of every channel, in the order of memory.

    Element i in memory belongs to column ⌊i/run⌋ mod `columns`.

    Attributes:
        table: float32 (6, columns): o, Δ, 1/Δ, z (the bits of an int32), and the offset and slope of Ã₁.
        bits: K.
        count: C.
        run: elements of a column that lie together.
        repeats: columns side by side that are of one channel.
    """

    table: Tensor
    bits: int
    count: int
    run: int
    repeats: int = 1

    def by_channel(self, values: Tensor) -> Tensor:
        """Return (…, columns) summed to (…, C)."""
        columns = values.shape[-1]
        if columns == self.count:
            return values
        return values.view(*values.shape[:-1], -1, self.count, self.repeats).sum((-3, -1))

    def by_column(self, values: Tensor) -> Tensor:
        """Return (…, C) spread over (…, columns), contiguous."""
        columns = self.table.shape[-1]
        if columns == self.count:
            return values
        spread = values[..., None, :, None]
        times = columns // (self.count * self.repeats)
        return (
            spread.expand(*values.shape[:-1], times, self.count, self.repeats)
            .reshape(*values.shape[:-1], columns)
            .contiguous()
        )

    @property
    def channels(self) -> Channels:
        """What `FixedPoint`'s functions take."""
        t = self.table
        return Channels(t[ORIGIN], t[STEP], t[INVERSE], t[ZERO].view(torch.int32))


def meaning_of(γ: Tensor, β: Tensor, bits: int, run: int, *, kernels: bool) -> Meaning:
    """Return what the codes mean.

    Args:
        γ, β: (C,).
        bits: K.
        run: elements of a channel that lie together in memory.
        kernels: for the CPU kernels, and made by one; else in plain torch, a column a channel.
    """
    C = γ.numel()
    if not kernels:
        return Meaning(_table(γ, β, bits), bits, C, run)
    γ, β = γ.float().contiguous(), β.float().contiguous()
    if run >= _LEAST_RUN or C == 0:
        return Meaning(cpu.table(γ, β, bits), bits, C, run)
    times = -(-_LEAST_COLUMNS // (C * run))
    return Meaning(cpu.table(γ, β, bits, run, times), bits, C, 1, run)


def for_coding(γ: Tensor, β: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and shift under which codes are made: 1 and 0 where γ = 0, for the codes of A₁ itself."""
    flat = γ == 0
    return torch.where(flat, 1, γ), torch.where(flat, 0, β)


def _table(γ: Tensor, β: Tensor, bits: int) -> Tensor:
    c = channels_of(γ, β, bits)
    γ, β = γ.double(), β.double()
    half, step = 1 << (bits - 1), 6.0 / (1 << bits)
    Δ = (step * γ.abs()).clamp(max=MOST_STEP)
    # ⌊β/Δ⌋Δ before it is rounded to float32: the offset is small, and a rounding of o may not be.
    multiple = (β / Δ).floor()
    multiple = multiple + (half - multiple > 2 * half - 1)
    offset = ((multiple * Δ - β) / γ).nan_to_num(0).clamp(-2 * step, 2 * step)
    flat = γ == 0
    zero = torch.where(flat, torch.where(β > 0, 0, 2 * half), c.zero).int()
    rows = (
        c.origin,
        c.step,
        c.inverse,
        zero.view(torch.float32),
        torch.where(flat | (c.step == 0), 0, offset).float(),
        torch.where(γ < 0, -step, step).float(),
    )
    return torch.stack(rows)
