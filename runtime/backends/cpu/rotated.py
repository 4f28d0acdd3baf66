"""Rotated codes on the CPU, with the arithmetic of reference/rotated.py, step by step.

Each step is taken for all groups of a block before the next (rotated_groups.py): so none waits for its own sums.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.packing import packed_size
from ...tensors.rotation import LARGEST_GROUP, SIGNS, groups_of, pieces, positive_edges, positive_levels
from ...tensors.traits import KINDS, largest
from ..reference.rotated import TURNS, buffer_size, seeds_of
from . import rotated_groups
from .buffers import PLANS, BufferPlan, Empty, empty_strided
from .numba_tools import GROUP, as_float, build, prefetch_to_read, random_words, read, scratch, take, vector, write
from .rotated_groups import (
    BLOCK,
    GROUPS,
    PARTS,
    SHARED_SIGNS,
    STAGE,
    SUMS,
    WORDS,
    add_lanes,
    clear,
    find_greatest,
    groups_of_row,
    lay_out,
    norm,
    powers,
    saved,
    share_signs,
    tree_sum,
    turn,
    turn_first,
    turn_last,
    turn_short,
    unit,
    up_to,
)
from .threads import JOB_WORDS, Job, Kernel, run, run_job
from .vector_code import LANES
from .vectors import CHUNK, HALF, find_codes, levels_of, spread_bits


def quantize(x: Tensor, bits: int, group_size: int, turns: int, unbiased: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    N, D = x.shape
    packed = torch.empty(N, packed_size(D, bits), dtype=torch.uint8, device="cpu")
    scale = torch.empty(N, groups_of(D, group_size), dtype=torch.bfloat16, device="cpu")
    blocks, *places = _places(N, D, group_size)
    how = (bits, turns, int(unbiased), seed, *_constants(bits))
    run(_quantizer(), blocks, x.data_ptr(), KINDS[x.dtype], packed.data_ptr(), scale.data_ptr(), *places, *how)
    return packed, scale


def dequantize(packed: Tensor, scale: Tensor, bits: int, group_size: int, turns: int, seed: int, out: Tensor) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    if out.dtype not in KINDS:
        single = torch.empty(out.shape, dtype=torch.float32, device="cpu")
        dequantize(packed, scale, bits, group_size, turns, seed, single)
        out.copy_(single)
        return
    N, D = out.shape
    blocks, *places = _places(N, D, group_size)
    limit = int(np.float32(largest(out.dtype)).view(np.int32))
    how = (bits, turns, limit, seed, *_constants(bits))
    run(_dequantizer(), blocks, out.data_ptr(), KINDS[out.dtype], packed.data_ptr(), scale.data_ptr(), *places, *how)


def quantize_buffers(
    xs: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    unbiased: Sequence[bool],
    group_size: int,
    empty: Empty = empty_strided,
) -> list[Tensor]:
    """Return scales and packed codes of each of `xs` in one buffer, as reference/rotated.py describes it."""
    buffers = []
    for x, seed, b, mean_is_right in zip(xs, seeds_of(key, offsets), bits, unbiased, strict=True):
        plan = _quantizing(x.shape, x.dtype, b, group_size, mean_is_right)
        x = x.contiguous()
        buffer = empty(plan.shape, plan.stride, torch.uint8)
        job = Job.from_buffer_copy(plan.job)
        job[3], job[5], job[6], job[16] = x.data_ptr(), buffer.data_ptr() + plan.codes, buffer.data_ptr(), seed
        run_job(plan.kernel, job)
        buffers.append(buffer)
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    features: Sequence[int],
    group_size: int,
    dtype: torch.dtype,
    empty: Empty = empty_strided,
) -> list[Tensor]:
    """Return the tensors that `quantize_buffers` gave the buffers of."""
    if dtype not in KINDS:
        single = dequantize_buffers(buffers, key, offsets, bits, features, group_size, torch.float32, empty)
        return [x.to(dtype) for x in single]
    xs = []
    for buffer, seed, b, D in zip(buffers, seeds_of(key, offsets), bits, features, strict=True):
        plan = _dequantizing(buffer.shape, dtype, b, D, group_size)
        buffer = buffer.contiguous()
        x = empty(plan.shape, plan.stride, dtype)
        job = Job.from_buffer_copy(plan.job)
        job[3], job[5], job[6], job[16] = x.data_ptr(), buffer.data_ptr() + plan.codes, buffer.data_ptr(), seed
        run_job(plan.kernel, job)
        xs.append(x)
    return xs


@lru_cache(PLANS)
def _quantizing(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int, unbiased: bool) -> BufferPlan:
    D = shape[-1]
    size = buffer_size(D, bits, group_size)
    return _plan(_quantizer(), shape, D, dtype, group_size, bits, int(unbiased), size)


@lru_cache(PLANS)
def _dequantizing(buffer: torch.Size, dtype: torch.dtype, bits: int, features: int, group_size: int) -> BufferPlan:
    limit = int(np.float32(largest(dtype)).view(np.int32))
    return _plan(_dequantizer(), buffer, features, dtype, group_size, bits, limit, features)


def _plan(
    kernel: Kernel, shape: torch.Size, D: int, dtype: torch.dtype, group_size: int, bits: int, last: int, size: int
) -> BufferPlan:
    """Return the plan of a kernel on rows of D elements whose results have `size`."""
    N = shape[:-1].numel()
    blocks, *places = _places(N, D, group_size)
    job = Job(0, 1, blocks, 0, KINDS[dtype], 0, 0, *places, bits, TURNS, last, 0, *_constants(bits))
    return BufferPlan.of(kernel, job, (*shape[:-1], size), 2 * N * groups_of(D, group_size))


def _places(N: int, D: int, group_size: int) -> tuple[int, ...]:
    """Return blocks, D, G, blocks of a row, counters of a group, N and rows of a block; or of all rows as one.

    Rows that are whole chunks in equal groups lie as one row does.
    """
    counters = max(1, group_size // SIGNS)
    size = next((piece.size for piece in pieces(D, group_size)), group_size)
    if size >= CHUNK and D % size == 0:
        N, D, group_size = min(N, 1), N * D, size
    count, rows = -(-D // BLOCK), max(1, BLOCK // (-(-max(D, 1) // CHUNK) * CHUNK))
    return -(-N // rows) * count, D, group_size, count, counters, N, rows


@cache
def _tables(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the positive levels, the edges between them and `spread_bits`, which live as long as the process.

    Of levels and edges there are eight at least, a vector.
    """
    levels, edges = positive_levels(bits), np.append(positive_edges(bits), np.float32(np.inf))
    return np.resize(levels, max(len(levels), LANES)), np.resize(edges, max(len(edges), LANES)), spread_bits(bits)


def _constants(bits: int) -> tuple[int, ...]:
    return tuple(table.ctypes.data for table in _tables(bits))


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        args = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, packed, scale_at = args[1], args[2], args[3], args[4], args[5], args[6]
        D, G, count, counters, N, rows = args[7], args[8], args[9], args[10], args[11], args[12]
        bits, turns, unbiased, seed = args[13], args[14], args[15], args[16]
        levels, edges, spread = args[17], args[18], args[19]
        width, of_row, size = up_to(D, GROUP) // GROUP * bits, groups_of_row(D, G), 4 if kind == 0 else 2
        scales = vector(scale_at, np.uint16(0), N * of_row)
        single, work = scratch(BLOCK, np.float32(0)), scratch(BLOCK, np.float32(0)).ctypes.data
        signs, words = scratch(SHARED_SIGNS, np.int32(0)), scratch(WORDS, np.uint32(0))
        staged = scratch(STAGE, np.uint8(0))
        sizes, slots, places = scratch(GROUPS, 0), scratch(GROUPS, 0), scratch(GROUPS, 0)
        of_chunks, most = scratch(GROUPS, np.int32(0)), scratch(GROUPS, np.int32(0))
        energy, deviation = scratch(GROUPS, np.float32(0)), scratch(GROUPS, np.float32(0))
        lanes, sums, squares = scratch(PARTS, np.float32(0)), scratch(SUMS, np.float32(0)), scratch(SUMS, np.float32(0))
        share_signs(seed, turns, D, G, counters, words, signs)
        shared, codes, lanes_at, random = signs.ctypes.data, staged.ctypes.data, lanes.ctypes.data, words.ctypes.data
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n, start = block // count * rows, block % count * BLOCK
                here, length = min(rows, N - n), min(BLOCK, D - start)
                first, k = n * D + start, n * of_row + start // G
                groups = lay_out(here, length, D - start, G, sizes, slots, places)
                prefetch_to_read(x + (first + here * length) * size, BLOCK * size)
                source = x + first * 4
                if kind != 0 or length % CHUNK:
                    source = np.int64(single.ctypes.data)
                    for row in range(here):
                        slot = vector(source + row * up_to(length, CHUNK) * 4, np.float32(0), up_to(length, CHUNK))
                        read(x, kind, first + row * D, length, slot)
                        for j in range(length, up_to(length, CHUNK)):
                            slot[j] = np.float32(0)
                random_words(seed, k * counters, groups * counters, words)
                find_greatest(source, groups, sizes, slots, lanes_at, of_chunks, most)
                for i in range(groups):
                    own, down = random + i * counters * 16, powers(most[i])[0]
                    turn_first(source, slots[i], sizes[i], down, own, work, lanes_at)
                add_lanes(lanes, 0, sums)
                for i in range(groups):
                    energy[i] = tree_sum(sums, slots[i], sizes[i])
                    deviation[i] = np.sqrt(energy[i] * unit(sizes[i], turns))
                    if sizes[i] < CHUNK:
                        turn_short(work + slots[i] * 4, sizes[i], turns, shared, False)
                    elif turns == 2:
                        turn(work + slots[i] * 4, sizes[i], shared + LARGEST_GROUP * 4, True)
                for i in range(groups):
                    r, halves = work + slots[i] * 4, up_to(sizes[i], CHUNK) // HALF
                    to = (sizes[i], codes + places[i] // GROUP * bits, lanes_at + slots[i])
                    how = (levels, edges, spread, *to, bits, unbiased)
                    find_codes(r, halves, deviation[i], *how)  # pyright: ignore[reportCallIssue]
                add_lanes(lanes, 0, sums)
                if not unbiased:
                    add_lanes(lanes, SUMS, squares)
                for i in range(groups):
                    along = tree_sum(sums, slots[i], sizes[i])
                    if unbiased:
                        scale = energy[i] / along
                    else:
                        scale = along / tree_sum(squares, slots[i], sizes[i]) * norm(sizes[i], turns)
                    scales[k + i] = saved(scale * powers(most[i])[1], most[i])
                    clear(codes + places[i] // GROUP * bits, sizes[i], bits, scales[k + i])
                used = here * up_to(length, GROUP) // GROUP * bits
                target = vector(packed + n * width + start // GROUP * bits, np.uint8(0), used)
                for j in range(used):
                    target[j] = staged[j]

    return build(quantize, rotated_groups)


@cache
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        args = carray(job, (JOB_WORDS,))
        parts, blocks, out, kind, packed, scale_at = args[1], args[2], args[3], args[4], args[5], args[6]
        D, G, count, counters, N, rows = args[7], args[8], args[9], args[10], args[11], args[12]
        bits, turns, limit, seed, half = args[13], args[14], as_float(args[15]), args[16], 1 << (args[13] - 1)
        positive, levels = vector(args[17], np.float32(0), half), scratch(256, np.float32(0))
        for i in range(max(2 * half, 8)):
            j = i % (2 * half)
            levels[i] = positive[j - half] if j >= half else -positive[half - 1 - j]
        width, of_row = up_to(D, GROUP) // GROUP * bits, groups_of_row(D, G)
        scales = vector(scale_at, np.uint16(0), N * of_row)
        single, work = scratch(BLOCK, np.float32(0)), scratch(BLOCK, np.float32(0)).ctypes.data
        signs, words = scratch(SHARED_SIGNS, np.int32(0)), scratch(WORDS, np.uint32(0))
        staged = scratch(STAGE, np.uint8(0))
        sizes, slots, places = scratch(GROUPS, 0), scratch(GROUPS, 0), scratch(GROUPS, 0)
        share_signs(seed, turns, D, G, counters, words, signs)
        shared, codes, levels_at, random = signs.ctypes.data, staged.ctypes.data, levels.ctypes.data, words.ctypes.data
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n, start = block // count * rows, block % count * BLOCK
                here, length = min(rows, N - n), min(BLOCK, D - start)
                first, k = n * D + start, n * of_row + start // G
                groups = lay_out(here, length, D - start, G, sizes, slots, places)
                used = here * up_to(length, GROUP) // GROUP * bits
                source = vector(packed + n * width + start // GROUP * bits, np.uint8(0), used)
                for j in range(used):
                    staged[j] = source[j]
                random_words(seed, k * counters, groups * counters, words)
                for i in range(groups):
                    for at in range(0, sizes[i], CHUNK):
                        from_, to = codes + (places[i] + at) // GROUP * bits, work + (slots[i] + at) * 4
                        levels_of(from_, levels_at, to, bits)  # pyright: ignore[reportCallIssue]
                for i in range(groups):
                    if sizes[i] < CHUNK:
                        turn_short(work + slots[i] * 4, sizes[i], turns, shared, True)
                    elif turns == 2:
                        turn(work + slots[i] * 4, sizes[i], 0, False)
                staging = kind != 0 or length % CHUNK != 0
                result = np.int64(single.ctypes.data) if staging else out + first * 4
                last = shared + (turns - 1) * LARGEST_GROUP * 4
                for i in range(groups):
                    own, factor = random + i * counters * 16, as_float(np.int32(scales[k + i]) << np.int32(16))
                    turn_last(work + slots[i] * 4, sizes[i], last, own, factor, limit, result + slots[i] * 4)
                if staging:
                    for row in range(here):
                        slot = vector(result + row * up_to(length, CHUNK) * 4, np.float32(0), length)
                        write(out, kind, first + row * D, length, slot)

    return build(dequantize, rotated_groups)
