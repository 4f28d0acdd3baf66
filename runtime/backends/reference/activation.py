"""Activations in plain torch, for any device: the oracle of every kernel's tests."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...tensors.levels import Prepared, prepare
from ...tensors.packing import pack, unpack
from ...tensors.spec import flat, with_stride
from ..forwards import forward_of


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    """Return f(x), by torch's own function with torch's strides, and its packed codes in that memory order."""
    y = forward_of(function).call(x, *parameters)  # with the strides of x: torch rounds differently for others
    return y, encode(with_stride(x, y.stride()), table)


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    t = prepare(table, x.dtype, x.device)
    # searchsorted counts the boundaries below x, and puts NaN after all of them: intervals are closed on the right.
    interval = torch.searchsorted(t.boundaries, flat(x), right=False)
    return pack(t.codes[interval], t.bits)


def factors_of(table: Prepared, codes: Tensor) -> Tensor:
    """Return the level of each code; 0 for codes without a level, as in the kernels."""
    return F.pad(table.levels, (0, (1 << table.bits) - table.levels.numel()))[codes.int()]


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout."""
    t = prepare(table, grad.dtype, grad.device)
    factors = factors_of(t, unpack(packed, t.bits, grad.numel()))
    product = torch.where(factors == 0, 0, flat(grad).to(factors.dtype) * factors)
    out = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    flat(out).copy_(product)
    return out
