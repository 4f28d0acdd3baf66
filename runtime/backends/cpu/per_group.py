"""Per-group quantization on the CPU, with the arithmetic of reference/per_group.py, step by step.

per_group_quantizer.py     the kernel that makes codes
per_group_dequantizer.py   the one that makes numbers of them

A block of `BLOCK` elements in groups of `USUAL`, or of half or a quarter of it, takes a code path with both as
constants: loops over 256 elements then compile to vector instructions without tests for short loops and last elements.
Every other block takes the same code with both as variables.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import lcm

import numpy as np
import torch
from torch import Tensor

from ...tensors.levels import (
    UNIFORM,
    prepare_levels,
)
from ...tensors.packing import Rows
from ...tensors.traits import KINDS, largest
from ..reference.per_group import buffer_size, elements_of, keys_of
from .buffers import PLANS, BufferPlan, Empty, empty_strided
from .numba_tools import (
    GROUP,
)
from .per_group_dequantizer import dequantizer
from .per_group_quantizer import BLOCK, quantizer
from .threads import Job, run, run_job

_CPU = torch.device("cpu")


def quantize(
    x: Tensor, bits: int | Tensor, group_size: int, seed: int, room: int = 0, levels: str = UNIFORM
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, minima and ranges of `x` (N, D), as `PerGroupCompressed` saves them.

    The codes of samples with bits of their own take `room` bytes, which are not less than they need. `levels` is a name
    or a key (tensors/levels.py).
    """
    N, D = x.shape
    G = max(1, min(group_size, D))
    groups = -(-D // G)
    minimum = torch.empty(N, groups, dtype=torch.bfloat16, device="cpu")
    range_ = torch.empty(N, groups, dtype=torch.bfloat16, device="cpu")
    stretch, count = _stretches(D, G)
    fixed, of_samples, starts = _bits(Rows(N, D, bits))
    if starts is None:
        packed = torch.empty(N, -(-D // GROUP) * fixed, dtype=torch.uint8, device="cpu")
    else:
        packed = torch.zeros(room, dtype=torch.uint8, device="cpu")
    arguments = (x.data_ptr(), KINDS[x.dtype], D, G, stretch, count, fixed, seed, packed.data_ptr())
    places = (of_samples, 0 if starts is None else starts.data_ptr())
    run(quantizer(), N * count, *arguments, minimum.data_ptr(), range_.data_ptr(), *places, 0, *_lines(levels))
    return packed, minimum, range_


def dequantize(
    packed: Tensor,
    minimum: Tensor,
    range_: Tensor,
    bits: int | Tensor,
    group_size: int,
    out: Tensor,
    levels: str = UNIFORM,
) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    if out.dtype not in KINDS:
        single = torch.empty(out.shape, dtype=torch.float32, device="cpu")
        dequantize(packed, minimum, range_, bits, group_size, single, levels)
        out.copy_(single)
        return
    N, D = out.shape
    G = max(1, min(group_size, D))
    stretch, count = _stretches(D, G)
    fixed, of_samples, starts = _bits(Rows(N, D, bits))
    arguments = (packed.data_ptr(), minimum.data_ptr(), range_.data_ptr(), D, G, stretch, count, fixed)
    places = (of_samples, 0 if starts is None else starts.data_ptr())
    numbers = (_limit(out.dtype), out.data_ptr(), KINDS[out.dtype])
    run(dequantizer(), N * count, *arguments, *numbers, *places, *_lines(levels))


def _lines(levels: str) -> tuple[int, int, int]:
    """Return the address of the lines of `levels`, which live as long as the process, their width and the shape."""
    prepared = prepare_levels(levels, _CPU)
    return prepared.lines.data_ptr(), prepared.width, prepared.shape


def quantize_buffers(
    xs: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    seeds: Tensor | None,
    stochastic: Sequence[bool],
    levels: str = UNIFORM,
    empty: Empty = empty_strided,
) -> list[Tensor]:
    """Return minima, ranges and packed codes of each of `xs` in one buffer, as reference/per_group.py describes it."""
    buffers = []
    for x, b, G, key in zip(xs, bits, group_sizes, keys_of(seeds, stochastic), strict=True):
        plan = _quantizing(x.shape, x.dtype, b, G, levels)
        x = x.contiguous()
        buffer = empty(plan.shape, plan.stride, torch.uint8)
        start = buffer.data_ptr()
        job = Job.from_buffer_copy(plan.job)
        job[3], job[10] = x.data_ptr(), key
        job[11], job[12], job[13] = start + plan.codes, start, start + plan.codes // 2
        run_job(plan.kernel, job)
        buffers.append(buffer)
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    dtype: torch.dtype,
    levels: str = UNIFORM,
    empty: Empty = empty_strided,
) -> list[Tensor]:
    """Return the tensors that `quantize_buffers` gave the buffers of."""
    if dtype not in KINDS:
        return [x.to(dtype) for x in dequantize_buffers(buffers, bits, group_sizes, torch.float32, levels, empty)]
    xs = []
    for buffer, b, G in zip(buffers, bits, group_sizes, strict=True):
        plan = _dequantizing(buffer.shape, dtype, b, G, levels)
        buffer = buffer.contiguous()
        x = empty(plan.shape, plan.stride, dtype)
        start = buffer.data_ptr()
        job = Job.from_buffer_copy(plan.job)
        job[3], job[4], job[5], job[12] = start + plan.codes, start, start + plan.codes // 2, x.data_ptr()
        run_job(plan.kernel, job)
        xs.append(x)
    return xs


@lru_cache(PLANS)
def _quantizing(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int, levels: str) -> BufferPlan:
    n = shape.numel()
    stretch, count = _stretches(n, group_size)
    sizes = (n, group_size, stretch, count, bits)
    job = Job(0, 1, count, 0, KINDS[dtype], *sizes, 0, 0, 0, 0, 0, 0, 1, *_lines(levels))
    size = buffer_size(shape[-1], bits, group_size)
    return BufferPlan.of(quantizer(), job, (*shape[:-1], size), 4 * (n // group_size))


@lru_cache(PLANS)
def _dequantizing(buffer: torch.Size, dtype: torch.dtype, bits: int, group_size: int, levels: str) -> BufferPlan:
    shape = torch.Size((*buffer[:-1], elements_of(buffer[-1], bits, group_size)))
    n = shape.numel()
    stretch, count = _stretches(n, group_size)
    sizes = (n, group_size, stretch, count, bits)
    job = Job(0, 1, count, 0, 0, 0, *sizes, _limit(dtype), 0, KINDS[dtype], 0, 0, *_lines(levels))
    return BufferPlan.of(dequantizer(), job, shape, 4 * (n // group_size))


@cache
def _limit(dtype: torch.dtype) -> int:
    """Return the bits of the largest number of `dtype`, as float32."""
    return int(np.float32(largest(dtype)).view(np.int32))


def _bits(rows: Rows) -> tuple[int, int, Tensor | None]:
    """Return the bits of all samples, or 0; or the address of the bits of each, and the first byte of each."""
    if isinstance(rows.bits, int):
        return rows.bits, 0, None
    return 0, rows.bits.data_ptr(), rows.starts()


def _stretches(D: int, G: int) -> tuple[int, int]:
    """Cut a sample into stretches of whole groups of codes and of values; return their length and number."""
    if G >= D:
        return max(D, 1), int(D > 0)
    whole = lcm(G, GROUP)
    stretch = whole * max(1, BLOCK // whole)
    return stretch, -(-D // stretch)
