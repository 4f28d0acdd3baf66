"""Codes of a table of kind `stochastic` on the GPU, with the arithmetic of reference/rounding.py, step by step."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tensors.dtypes import KINDS, name_of
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.rounding_table import prepare_rounding
from ..reference import rounding as reference
from .codegen.rounding import ELEMENTS_PER_BLOCK, rounding_source
from .launching import Loaded, available, loaded, seed_arguments


def encode_at_random(x: Tensor, table: str, seed: Seed) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order, rounded at random: uint8 (⌈n/8⌉·bits,)."""
    if not available(x.get_device()):
        return reference.encode_at_random(x, table, seed)
    t = prepare_rounding(table, x.device)
    x = x if x.dtype in KINDS else x.float()
    n = x.numel()
    packed = torch.empty(packed_size(n, t.bits), dtype=torch.uint8, device=x.device)
    lines = (t.slope.data_ptr(), t.base.data_ptr(), t.jumps.data_ptr(), n, t.last, t.jumps.numel())
    ends = (_bits(t.low), _bits(t.high), _bits(t.inverse))
    arguments = (x.data_ptr(), packed.data_ptr(), *lines, *ends, t.top, *seed_arguments(seed))
    _launch(x, t.bits, -(-n // ELEMENTS_PER_BLOCK), *arguments)
    return packed


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _launch(x: Tensor, bits: int, blocks: int, *arguments: int) -> None:
    """Run the kernel on the device of `x`."""
    if blocks:
        _kernel(name_of(x.dtype), bits, x.get_device()).launch(blocks, *arguments)


@cache
def _kernel(dtype: str, bits: int, device: int) -> Loaded:
    return loaded(rounding_source(dtype, bits), "encode", device)
