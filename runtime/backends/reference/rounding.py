"""Codes of a table of kind `stochastic` in plain torch: tensors/levels.py has the arithmetic."""

import torch
from torch import Tensor

from ...tensors.levels import prepare_rounding
from ...tensors.packing import GROUP, pack
from ...tensors.philox import Seed, random_halves
from ...tensors.spec import flat


def encode_at_random(x: Tensor, table: str, seed: Seed) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order, rounded at random: uint8 (⌈n/8⌉·bits,).

    NaN has the greatest code.
    """
    t = prepare_rounding(table, x.device)
    single = flat(x).float()
    n = single.numel()
    inside = single.nan_to_num(0.0).clamp(t.low, t.high)
    cell = ((inside - t.low) * t.inverse).int().clamp(0, t.last)
    for jump in t.jumps:
        cell += inside > jump
    v = t.slope[cell] * inside + t.base[cell]
    scaled = (v * 65536.0 + 0.5).clamp(0.0, t.top * 65536.0).int()
    ξ = random_halves(seed, -(-n // GROUP), x.device).view(-1)[:n]
    codes = torch.where(single.isnan(), t.top, (scaled + ξ >> 16).clamp(max=t.top))
    return pack(codes.to(torch.uint8), t.bits)
