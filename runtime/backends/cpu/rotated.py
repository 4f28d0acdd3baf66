"""Rotated codes on the CPU, with the arithmetic of reference/rotated.py, step by step.

Groups of 64, 128 and 256 numbers are sequences of chunks, which vectors.py takes in registers; what is left of a row,
at most one group of fewer than 64 numbers, takes loops.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.dtypes import KINDS, largest
from ...tensors.packing import packed_size
from ...tensors.rotation import (
    LARGEST_GROUP,
    LEAST_PIECE,
    SHARED,
    SIGNS,
    groups_of,
    pieces,
    positive_edges,
    positive_levels,
)
from ..reference.rotated import INFINITY, LARGEST_HALF, NOT_A_NUMBER, TURNS, buffer_size, seeds_of
from .buffers import PLANS, BufferPlan, Empty, empty_strided
from .numba_tools import (
    GROUP,
    as_bits,
    as_float,
    build,
    prefetch_to_read,
    random_words,
    read,
    read_codes,
    scratch,
    take,
    vector,
    write,
    write_codes,
)
from .threads import JOB_WORDS, Job, Kernel, run, run_job
from .vectors import CHUNK, across, butterflies, find_codes, flip_and_scale, greatest, levels_of, scale_and_flip

BLOCK = 1024  # elements processed at once, a multiple of all groups
_STAGE = BLOCK + GROUP
_MOST = LARGEST_GROUP
_PIECE = LEAST_PIECE
_SHARED_SIGNS = 5 * _MOST  # of the passes but the first, which all groups share
_SHARED, _SIGNS = np.uint64(SHARED), SIGNS
_WORDS = 4 * (BLOCK // _PIECE + 8)  # random, of the groups of a block
_INFINITY, _NOT_A_NUMBER, _LARGEST_HALF = np.int32(INFINITY), np.uint16(NOT_A_NUMBER), np.int32(LARGEST_HALF)
_MAGNITUDE = np.int32(0x7FFFFFFF)


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
        job[3], job[5], job[6], job[14] = x.data_ptr(), buffer.data_ptr() + plan.codes, buffer.data_ptr(), seed
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
        job[3], job[5], job[6], job[14] = x.data_ptr(), buffer.data_ptr() + plan.codes, buffer.data_ptr(), seed
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
    """Return blocks, D, G, blocks of a row and counters of a group; rows of whole equal groups are one row."""
    counters = max(1, group_size // SIGNS)
    size = next((piece.size for piece in pieces(D, group_size)), group_size)
    if D % size == 0 and size & (size - 1) == 0:
        N, D, group_size = min(N, 1), N * D, max(size, 1)
    count = -(-D // BLOCK)
    return N * count, D, group_size, count, counters


@cache
def _tables(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positive levels and edges, which live as long as the process; the edges end with infinity."""
    return positive_levels(bits).copy(), np.append(positive_edges(bits), np.float32(np.inf))


def _constants(bits: int) -> tuple[int, int]:
    levels, edges = _tables(bits)
    return levels.ctypes.data, edges.ctypes.data


# ---- groups of chunks ------------------------------------------------------------------------------------------------


@njit(inline="always")
def _turn(x: Any, g: Any, signs: Any, flips: Any) -> None:
    """Take sums and differences of the `g` numbers at an address, where `flips` with their signs flipped first."""
    for at in range(0, g, 2 * CHUNK):
        here, next_ = x + at * 4, x + (at + CHUNK) * 4
        if flips:
            butterflies(here, signs + at * 4, 0)  # pyright: ignore[reportCallIssue]
            if g > CHUNK:
                butterflies(next_, signs + (at + CHUNK) * 4, 1)  # pyright: ignore[reportCallIssue]
        else:
            butterflies(here, 0, 0)  # pyright: ignore[reportCallIssue]
            if g > CHUNK:
                butterflies(next_, 0, 1)  # pyright: ignore[reportCallIssue]
    if g == 4 * CHUNK:
        across(x, x + 2 * CHUNK * 4)  # pyright: ignore[reportCallIssue]
        across(x + CHUNK * 4, x + 3 * CHUNK * 4)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _added(total: Any, part: Any, at: Any, before: Any) -> Any:
    """Return the sum of the chunks so far, pairs first, and of the first chunk of a pair alone."""
    if at % (2 * CHUNK) == 0:
        return total, part
    pair = before + part
    return (pair if at == CHUNK else total + pair), np.float32(0)


@njit
def _keep(
    x: Any, g: Any, turns: Any, unbiased: Any, bits: Any, words: Any, shared: Any, tables: Any, work: Any, codes: Any
) -> Any:
    """Write the codes of a group of `g` numbers, 64, 128 or 256, at an address; return the 16 bits of its scale."""
    levels, edges, limits = tables
    r = work
    most = np.int32(0)
    for at in range(0, g, CHUNK):
        most = max(most, greatest(x + at * 4))  # pyright: ignore[reportCallIssue]
    if most == 0 or most >= _INFINITY:
        return _without_codes(codes, g, most)
    down, up = _powers(most)
    energy, before = np.float32(0), np.float32(0)
    for at in range(0, g, CHUNK):
        part = scale_and_flip(x + at * 4, down, words + at // 8, r + at * 4)  # pyright: ignore[reportCallIssue]
        energy, before = _added(energy, part, at, before)
    if g == CHUNK:
        energy = before
    _turn(r, g, 0, False)
    if turns == 2:
        _turn(r, g, shared, True)
    half = 1 << (bits - 1)
    deviation = np.sqrt(energy * np.float32(g if turns == 2 else 1))
    edge, limit = vector(edges, np.float32(0), half), vector(limits, np.float32(0), half)
    for i in range(half):
        limit[i] = deviation * edge[i]
    along, before = np.float32(0), np.float32(0)
    for at in range(0, g, CHUNK):
        if bits == 1:
            part = find_codes(r + at * 4, limits, levels, codes + at, 1)  # pyright: ignore[reportCallIssue]
        elif bits == 2:
            part = find_codes(r + at * 4, limits, levels, codes + at, 2)  # pyright: ignore[reportCallIssue]
        elif bits == 3:
            part = find_codes(r + at * 4, limits, levels, codes + at, 3)  # pyright: ignore[reportCallIssue]
        elif bits == 4:
            part = find_codes(r + at * 4, limits, levels, codes + at, 4)  # pyright: ignore[reportCallIssue]
        else:
            part = _search(r + at * 4, CHUNK, bits, limits, levels, codes + at)
        along, before = _added(along, part, at, before)
    if g == CHUNK:
        along = before
    if unbiased:
        scale = energy / along
    else:
        scale = along / _squared_levels(codes, g, bits, levels) * np.float32(1 / np.float64(g * g if turns == 2 else g))
    return _saved(scale * up, codes, g)


@njit
def _restore(x: Any, g: Any, turns: Any, words: Any, shared: Any, scale: Any, limit: Any) -> None:
    """Turn the levels of a group of 64, 128 or 256 numbers at an address back, and scale them."""
    _turn(x, g, 0, False)
    if turns == 2:
        _turn(x, g, shared, True)
    factor = as_float(np.int32(scale) << np.int32(16))
    for at in range(0, g, CHUNK):
        flip_and_scale(x + at * 4, words + at // 8, factor, limit)  # pyright: ignore[reportCallIssue]
    if factor == np.float32(0):
        values = vector(x, np.float32(0), g)
        for j in range(g):
            values[j] = np.float32(0)


# ---- groups of fewer numbers -----------------------------------------------------------------------------------------


@njit
def _keep_short(
    x: Any, g: Any, turns: Any, unbiased: Any, bits: Any, words: Any, shared: Any, tables: Any, work: Any, codes: Any
) -> Any:
    """Do as `_keep` for a group of fewer than 64 numbers."""
    levels, edges, limits = tables
    values, r, terms = vector(x, np.float32(0), g), vector(work, np.float32(0), CHUNK), scratch(64, np.float32(0))
    most = np.int32(0)
    for j in range(g):
        most = max(most, np.int32(as_bits(values[j]) & _MAGNITUDE))
    if most == 0 or most >= _INFINITY:
        return _without_codes(codes, g, most)
    down, up = _powers(most)
    for j in range(CHUNK):
        terms[j] = np.float32(0)
    own = vector(words, np.uint32(0), 2)
    for j in range(g):
        v = values[j] * down
        terms[j] = v * v
        r[j] = -v if own[j // 32] >> np.uint32(j % 32) & np.uint32(1) else v
    energy = _tree_sum(terms)
    p = _power_in(g)
    _turn_short(work, g, p, turns, shared)
    unit = np.float32((g if turns == 2 else 1) if p == g else 1 / np.float64(g))
    half = 1 << (bits - 1)
    deviation = np.sqrt(energy * unit)
    edge, limit = vector(edges, np.float32(0), half), vector(limits, np.float32(0), half)
    for i in range(half):
        limit[i] = deviation * edge[i]
    along = _search(work, g, bits, limits, levels, codes)
    if unbiased:
        scale = energy / along
    else:
        scale = along / _squared_levels(codes, g, bits, levels)
        if p == g:
            scale *= np.float32(1 / np.float64(g * g if turns == 2 else g))
    return _saved(scale * up, codes, g)


@njit
def _restore_short(x: Any, g: Any, turns: Any, words: Any, shared: Any, scale: Any, limit: Any) -> None:
    """Do as `_restore` for a group of fewer than 64 numbers."""
    values, own, p = vector(x, np.float32(0), g), vector(words, np.uint32(0), 2), _power_in(g)
    places = 1 if p == g else 3
    for m in range(places * turns - 1, -1, -1):
        begin = g - p if m % 3 == 1 and p < g else 0
        _butterflies(x + begin * 4, p, p < g)
        if m > 0:
            _flip(x + begin * 4, p, shared + (m - 1) * _MOST * 4)
    factor = as_float(np.int32(scale) << np.int32(16))
    for j in range(g):
        v = (-values[j] if own[j // 32] >> np.uint32(j % 32) & np.uint32(1) else values[j]) * factor
        v = -limit if v < -limit else v
        v = limit if v > limit else v
        values[j] = np.float32(0) if factor == np.float32(0) else v


@njit
def _turn_short(x: Any, g: Any, p: Any, turns: Any, shared: Any) -> None:
    """Turn `g` numbers at an address, whose signs are flipped, by passes over `p` of them."""
    places = 1 if p == g else 3
    for m in range(places * turns):
        begin = g - p if m % 3 == 1 and p < g else 0
        if m > 0:
            _flip(x + begin * 4, p, shared + (m - 1) * _MOST * 4)
        _butterflies(x + begin * 4, p, p < g)


@njit
def _butterflies(x: Any, p: Any, shortens: Any) -> None:
    """Take sums and differences of `p` numbers at an address; divide them by √p where `shortens`."""
    r = vector(x, np.float32(0), p)
    step = 1
    while step < p:
        for start in range(0, p, 2 * step):
            for j in range(start, start + step):
                a, b = r[j], r[j + step]
                r[j], r[j + step] = a + b, a - b
        step *= 2
    if shortens:
        by = np.float32(1 / np.sqrt(np.float64(p)))
        for j in range(p):
            r[j] *= by


@njit
def _flip(x: Any, p: Any, signs: Any) -> None:
    r, flips = vector(x, np.float32(0), p), vector(signs, np.int32(0), p)
    for j in range(p):
        r[j] = -r[j] if flips[j] else r[j]


@njit(inline="always")
def _tree_sum(terms: Any) -> Any:
    """Return the sum of 64 numbers, of which those at the end are 0, in the order of all backends."""
    for start in range(0, 64, 32):
        n = 32
        while n > 1:
            n //= 2
            for j in range(start, start + n):
                terms[j] = terms[j] + terms[j + n]
    return terms[0] + terms[32]


# ---- what both share -------------------------------------------------------------------------------------------------


@njit
def _search(r: Any, g: Any, bits: Any, limits: Any, levels: Any, codes: Any) -> Any:
    """Write the codes of `g` numbers, at most 64; return the sum of magnitudes times levels. For any number of bits."""
    half = np.int32(1 << (bits - 1))
    numbers, small = vector(r, np.float32(0), g), vector(codes, np.uint8(0), g)
    limit, level = vector(limits, np.float32(0), half), vector(levels, np.float32(0), half)
    terms = scratch(64, np.float32(0))
    above = scratch(64, np.uint32(0))
    for j in range(64):
        terms[j] = np.float32(0)
        above[j] = 0
    stride = half // 2
    while stride > 0:
        middle = limit[stride - 1 :]
        for j in range(g):
            above[j] += np.uint32(stride) if np.abs(numbers[j]) > middle[above[j]] else np.uint32(0)
        stride //= 2
    for j in range(g):
        m = np.int32(above[j])
        terms[j] = np.abs(numbers[j]) * level[above[j]]
        small[j] = np.uint8(half + m if numbers[j] > np.float32(0) else half - np.int32(1) - m)
    return _tree_sum(terms)


@njit
def _squared_levels(codes: Any, g: Any, bits: Any, levels: Any) -> Any:
    """Return the sum of the squares of the levels of `g` codes."""
    half = 1 << (bits - 1)
    small, level = vector(codes, np.uint8(0), g), vector(levels, np.float32(0), half)
    terms = scratch(64, np.float32(0))
    total, before = np.float32(0), np.float32(0)
    for at in range(0, g, CHUNK):
        for j in range(CHUNK):
            terms[j] = np.float32(0)
        for j in range(min(CHUNK, g - at)):
            c = np.int64(small[at + j])
            value = level[c - half if c >= half else half - 1 - c]
            terms[j] = value * value
        total, before = _added(total, _tree_sum(terms), at, before)
    return before if g <= CHUNK else total


@njit(inline="always")
def _powers(most: Any) -> Any:
    """Return 2^-e and 2^e for the bits of a magnitude from 2^e on, such that both are normal numbers."""
    exponent = min(max(most >> np.int32(23), np.int32(2)), np.int32(253))
    return as_float((np.int32(254) - exponent) << np.int32(23)), as_float(exponent << np.int32(23))


@njit(inline="always")
def _saved(scale: Any, codes: Any, g: Any) -> Any:
    """Return the 16 bits of a scale, to nearest; where they are 0 all codes are."""
    pattern = as_bits(scale)
    rounded = (pattern + np.int32(0x7FFF) + (pattern >> np.int32(16) & np.int32(1))) >> np.int32(16)
    if rounded == 0:
        _without_codes(codes, g, 0)
    return np.uint16(min(rounded, _LARGEST_HALF))


@njit
def _without_codes(codes: Any, g: Any, most: Any) -> Any:
    """Write codes of 0; return the 16 bits of the scale of zeros, or of numbers that are not finite."""
    small = vector(codes, np.uint8(0), g)
    for j in range(g):
        small[j] = 0
    return np.uint16(0) if most == 0 else _NOT_A_NUMBER


@njit(inline="always")
def _power_in(g: Any) -> Any:
    """Return the largest power of two not above `g`."""
    p = 1
    while 2 * p <= g:
        p *= 2
    return p


@njit(inline="always")
def _size_at(left: Any, G: Any) -> Any:
    """Return the size of the next group, where `left` elements are left of the row."""
    size = G
    while size > max(left, _PIECE):
        size //= 2
    return min(size, left)


@njit(inline="always")
def _groups_of(D: Any, G: Any) -> Any:
    """Return the number of groups of a row."""
    groups, left = D // G, D % G
    while left > 0:
        left -= _size_at(left, G)
        groups += 1
    return groups


@njit
def _share(seed: Any, turns: Any, D: Any, G: Any, counters: Any, words: Any, shared: Any) -> None:
    """Write the signs of all passes but the first, which all groups share; more than a turn each only where g ≠ p."""
    passes = turns if D % _PIECE == 0 else 3 * turns
    for m in range(1, passes):
        random_words(seed, _SHARED + np.uint64(2 * m), counters, words)
        for i in range(min(counters * _SIGNS, _MOST)):
            bit = words[i // 32] >> np.uint32(i % 32) & np.uint32(1)
            shared[(m - 1) * _MOST + i] = np.int32(~0x7FFFFFFF) if bit else np.int32(0)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        args = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, packed, scale_at = args[1], args[2], args[3], args[4], args[5], args[6]
        D, G, count, counters = args[7], args[8], args[9], args[10]
        bits, turns, unbiased, seed, levels, edges = args[11], args[12], args[13], args[14], args[15], args[16]
        width = (D + GROUP - 1) // GROUP * bits
        of_row = _groups_of(D, G)
        scales = vector(scale_at, np.uint16(0), blocks // max(count, 1) * of_row)
        size = 4 if kind == 0 else 2
        single = scratch(BLOCK, np.float32(0))
        r = scratch(_MOST, np.float32(0)).ctypes.data
        limits = scratch(128, np.float32(0)).ctypes.data
        shared = scratch(_SHARED_SIGNS, np.int32(0))
        words = scratch(_WORDS, np.uint32(0))
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(_STAGE, np.uint8(0))
        tables = levels, edges, limits
        _share(seed, turns, D, G, counters, words, shared)
        signs = shared.ctypes.data
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n = block // count
                start = block % count * BLOCK
                length = min(BLOCK, D - start)
                prefetch_to_read(x + (n * D + start + length) * size, BLOCK * size)
                source = x + (n * D + start) * 4
                if kind != 0:
                    read(x, kind, n * D + start, length, single)
                    source = np.int64(single.ctypes.data)
                k = n * of_row + start // G
                random_words(seed, k * counters, (length // G + (3 if length % G else 0)) * counters, words)
                at, i = 0, 0
                while at < length:
                    g = _size_at(D - start - at, G)
                    own = words.ctypes.data + i * counters * 16
                    from_, to = source + at * 4, small.ctypes.data + at
                    if g >= CHUNK:
                        scales[k + i] = _keep(from_, g, turns, unbiased, bits, own, signs, tables, r, to)
                    else:
                        scales[k + i] = _keep_short(from_, g, turns, unbiased, bits, own, signs, tables, r, to)
                    at += g
                    i += 1
                write_codes(small, length, bits, staged, packed + n * width, start // GROUP)

    return build(quantize)


@cache
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        args = carray(job, (JOB_WORDS,))
        parts, blocks, out, kind, packed, scale_at = args[1], args[2], args[3], args[4], args[5], args[6]
        D, G, count, counters = args[7], args[8], args[9], args[10]
        bits, turns, limit, seed, levels = args[11], args[12], as_float(args[13]), args[14], args[15]
        half = 1 << (bits - 1)
        positive = vector(levels, np.float32(0), half)
        both = scratch(256, np.float32(0))
        for i in range(half):
            both[half + i] = positive[i]
            both[half - 1 - i] = -positive[i]
        width = (D + GROUP - 1) // GROUP * bits
        of_row = _groups_of(D, G)
        scales = vector(scale_at, np.uint16(0), blocks // max(count, 1) * of_row)
        values = scratch(BLOCK, np.float32(0))
        shared = scratch(_SHARED_SIGNS, np.int32(0))
        words = scratch(_WORDS, np.uint32(0))
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(_STAGE, np.uint8(0))
        _share(seed, turns, D, G, counters, words, shared)
        signs = shared.ctypes.data
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n = block // count
                start = block % count * BLOCK
                length = min(BLOCK, D - start)
                read_codes(packed + n * width, start // GROUP, length, bits, staged, small)
                k = n * of_row + start // G
                random_words(seed, k * counters, (length // G + (3 if length % G else 0)) * counters, words)
                result = out + (n * D + start) * 4 if kind == 0 else np.int64(values.ctypes.data)
                chunks = length // CHUNK * CHUNK if bits <= 4 else 0
                for at in range(0, chunks, CHUNK):
                    from_, to = small.ctypes.data + at, result + at * 4
                    if bits == 1:
                        levels_of(from_, levels, to, 1)  # pyright: ignore[reportCallIssue]
                    elif bits == 2:
                        levels_of(from_, levels, to, 2)  # pyright: ignore[reportCallIssue]
                    elif bits == 3:
                        levels_of(from_, levels, to, 3)  # pyright: ignore[reportCallIssue]
                    else:
                        levels_of(from_, levels, to, 4)  # pyright: ignore[reportCallIssue]
                rest = vector(result, np.float32(0), length)
                for j in range(chunks, length):
                    rest[j] = both[small[j]]
                at, i = 0, 0
                while at < length:
                    g = _size_at(D - start - at, G)
                    own, x = words.ctypes.data + i * counters * 16, result + at * 4
                    if g >= CHUNK:
                        _restore(x, g, turns, own, signs, scales[k + i], limit)
                    else:
                        _restore_short(x, g, turns, own, signs, scales[k + i], limit)
                    at += g
                    i += 1
                if kind != 0:
                    write(out, kind, n * D + start, length, values)

    return build(dequantize)
