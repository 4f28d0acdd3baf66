"""The reference backend: plain torch, any device. The oracle of every kernel's tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..forwards import Forward
from ..layout import flat
from ..packing import pack, unpack
from ..prepared import prepare


def forward(x: Tensor, function: Forward, parameters: Sequence[float]) -> Tensor:
    """Return f(x) by torch's own function, in the layout that torch gives it."""
    return function.call(x, *parameters)


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    t = prepare(table, x.dtype, x.device)
    # searchsorted counts the boundaries below x, and puts NaN behind all of them: intervals are closed on the right.
    interval = torch.searchsorted(t.boundaries, flat(x), right=False)
    return pack(t.codes[interval], t.bits)


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout."""
    t = prepare(table, grad.dtype, grad.device)
    codes = unpack(packed, t.bits, grad.numel())
    factors = t.levels[codes.int()]
    product = torch.where(factors == 0, 0, flat(grad).to(factors.dtype) * factors)
    out = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    flat(out).copy_(product)
    return out
