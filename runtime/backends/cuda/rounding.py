"""Codes of a table of kind `stochastic` on the GPU, with the arithmetic of reference/rounding.py, step by step."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tensors.levels import RoundingTable, prepare_rounding, table_of
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.spec import as_dense, with_stride
from ...tensors.traits import KINDS, name_of
from ..forwards import forward_of, key_of
from ..reference import rounding as reference
from .activation import empty_result
from .codegen import FORMULAS
from .codegen.rounding import ELEMENTS_PER_BLOCK, rounding_source
from .launching import Loaded, available, loaded, seed_arguments


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return f(x), with the strides that torch gives it, and the packed codes in that order, rounded at random.

    x is read once where f has a formula, as by activation.py.
    """
    if x.dtype not in KINDS or function not in FORMULAS or not available(x.get_device()):
        y = forward_of(function).call(x, *parameters)
        return y, encode_at_random(with_stride(x, y.stride()), table, seed)
    x, t = as_dense(x), prepare_rounding(table, x.device)
    y, packed = empty_result(x), torch.empty(packed_size(x.numel(), t.bits), dtype=torch.uint8, device=x.device)
    memory = (x.data_ptr(), y.data_ptr(), packed.data_ptr())
    _launch(x, (table, function, key_of(parameters)), t.bits, *memory, *_lines(x, t), *seed_arguments(seed))
    return y, packed


def encode_at_random(x: Tensor, table: str, seed: Seed) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order, rounded at random: uint8 (⌈n/8⌉·bits,)."""
    if not available(x.get_device()):
        return reference.encode_at_random(x, table, seed)
    t = prepare_rounding(table, x.device)
    x = x if x.dtype in KINDS else x.float()
    packed = torch.empty(packed_size(x.numel(), t.bits), dtype=torch.uint8, device=x.device)
    _launch(x, None, t.bits, x.data_ptr(), packed.data_ptr(), *_lines(x, t), *seed_arguments(seed))
    return packed


def _lines(x: Tensor, t: RoundingTable) -> tuple[int, ...]:
    """Return the arguments of a kernel from `slope` to `top`."""
    arrays = (t.slope.data_ptr(), t.base.data_ptr(), t.jumps.data_ptr(), x.numel(), t.last, t.jumps.numel())
    return *arrays, _bits(t.low), _bits(t.high), _bits(t.inverse), t.top


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


Forward = tuple[str, str, tuple[str, ...]]  # a table, and f


def _launch(x: Tensor, forward: Forward | None, bits: int, *arguments: int) -> None:
    """Run the kernel that writes f(x) too, or codes alone, over the elements of `x` on its device."""
    if x.numel():
        kernel = _kernel(forward, name_of(x.dtype), bits, x.get_device())
        kernel.launch(-(-x.numel() // ELEMENTS_PER_BLOCK), *arguments)


@cache
def _kernel(forward: Forward | None, dtype: str, bits: int, device: int) -> Loaded:
    return loaded(_source(forward, dtype, bits), "encode" if forward is None else "forward", device)


def _source(forward: Forward | None, dtype: str, bits: int) -> str:
    """Return the source of the kernel."""
    if forward is None:
        return rounding_source(dtype, bits)
    table, function, parameters = forward
    return rounding_source(dtype, bits, table_of(table), function, tuple(map(float, parameters)))
