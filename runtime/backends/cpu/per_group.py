"""Per-group quantization on the CPU, with the arithmetic of reference/per_group.py, step by step.

A block of `BLOCK` elements in groups of `USUAL`, or of half or a quarter of it, takes a code path with both as
constants: loops over 256 elements then compile to vector instructions without tests for short loops and last elements.
Every other block takes the same code with both as variables.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import lcm
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.dtypes import KINDS, largest
from ...tensors.levels import (
    ABOVE,
    BELOW,
    CHOOSES,
    EXPONENTS,
    FIRST_EXPONENT,
    LEAST_RANGE,
    LOWERED,
    NOTHING,
    OTHERWISE_LEAST,
    SAMPLE,
    UNIFORM,
    prepare_levels,
)
from ...tensors.philox import GOLDEN_RATIO, NEAREST
from ...tensors.rows import Rows
from ..reference.per_group import buffer_size, elements_of, keys_of
from .buffers import PLANS, BufferPlan, Empty, empty_strided
from .numba_tools import (
    GROUP,
    as_bits,
    as_float,
    build,
    prefetch_to_read,
    prefetch_to_write,
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

# Elements processed at once. Fewer cost more overhead per block, more exceed the cache.
BLOCK = 1024
USUAL, HALF, QUARTER = 256, 128, 64  # G
_WORDS = BLOCK // 2  # of 32 random bits
_TURNS = 4 * (BLOCK // GROUP + 1)  # the words of a counter for every eight groups, of one element and more
_STAGE = BLOCK + GROUP

_TOP = np.int32(0x7FFFFFFF)
_FINITE = np.int32(0x7F7FFFFF)

_LEAST_RANGE = np.float32(LEAST_RANGE)
_NOTHING, _BELOW, _ABOVE = np.float32(NOTHING), np.float32(BELOW), np.float32(ABOVE)
_NORMAL_LOWERED, _SKEWED_LOWERED = np.int32(LOWERED[1]), np.int32(LOWERED[2])
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
    run(_quantizer(), N * count, *arguments, minimum.data_ptr(), range_.data_ptr(), *places, 0, *_lines(levels))
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
    run(_dequantizer(), N * count, *arguments, *numbers, *places, *_lines(levels))


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
    return BufferPlan.of(_quantizer(), job, (*shape[:-1], size), 4 * (n // group_size))


@lru_cache(PLANS)
def _dequantizing(buffer: torch.Size, dtype: torch.dtype, bits: int, group_size: int, levels: str) -> BufferPlan:
    shape = torch.Size((*buffer[:-1], elements_of(buffer[-1], bits, group_size)))
    n = shape.numel()
    stretch, count = _stretches(n, group_size)
    sizes = (n, group_size, stretch, count, bits)
    job = Job(0, 1, count, 0, 0, 0, *sizes, _limit(dtype), 0, KINDS[dtype], 0, 0, *_lines(levels))
    return BufferPlan.of(_dequantizer(), job, shape, 4 * (n // group_size))


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


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, D, G = words[1], words[2], words[3], words[4], words[5], words[6]
        stretch, count, fixed, seed, packed = words[7], words[8], words[9], words[10], words[11]
        groups = (D + G - 1) // G
        width = (D + GROUP - 1) // GROUP
        N = blocks // max(count, 1)
        minima = vector(words[12], np.uint16(0), N * groups)
        ranges = vector(words[13], np.uint16(0), N * groups)
        of_samples = vector(words[14], np.uint8(0), N)
        starts = vector(words[15], np.int64(0), N)
        rotated = words[16]
        width_of_lines, shape = words[18], words[19]
        lines = vector(words[17], np.float32(0), 54 * width_of_lines)
        size = 4 if kind == 0 else 2
        ahead = BLOCK * 4 if kind == 0 else BLOCK * 2  # past the last block it is useless but harmless
        single = scratch(BLOCK, np.float32(0))
        turns = scratch(_TURNS, np.uint32(0))
        random = scratch(_WORDS, np.uint32(0))
        dice = random.view(np.uint16)
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(_STAGE, np.uint8(0))
        distance = scratch(BLOCK, np.float32(0))
        position = scratch(BLOCK, np.float32(0))
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n = block // count
                start = block % count * stretch
                end = min(start + stretch, D)
                bits = fixed if fixed else np.int64(of_samples[n])
                row = packed + (n * width * fixed if fixed else starts[n])
                curve = lines[bits * 6 * width_of_lines :], width_of_lines, shape, distance, position
                top = np.int32((1 << bits) - 1)
                group = n * groups + start // G
                counter = n * width + start // GROUP
                if stretch <= BLOCK:  # whole groups: x is read once
                    at = x + (n * D + start) * size
                    prefetch_to_read(at + (end - start) * size, ahead)
                    if end - start == BLOCK and G in (USUAL, HALF, QUARTER):
                        values = _loaded(at, kind, BLOCK, single)
                        if G == USUAL:
                            _draw(seed, counter, BLOCK, rotated, group, USUAL, 0, turns, random)  # x is being fetched
                            _keep_groups(values, BLOCK, USUAL, shape, minima, ranges, group)
                            _find_codes(values, BLOCK, USUAL, 0, minima, ranges, group, dice, top, curve, small)
                        elif G == HALF:
                            _draw(seed, counter, BLOCK, rotated, group, HALF, 0, turns, random)
                            _keep_groups(values, BLOCK, HALF, shape, minima, ranges, group)
                            _find_codes(values, BLOCK, HALF, 0, minima, ranges, group, dice, top, curve, small)
                        else:
                            _draw(seed, counter, BLOCK, rotated, group, QUARTER, 0, turns, random)
                            _keep_groups(values, BLOCK, QUARTER, shape, minima, ranges, group)
                            _find_codes(values, BLOCK, QUARTER, 0, minima, ranges, group, dice, top, curve, small)
                        write_codes(small, BLOCK, bits, staged, row, start // GROUP)
                    else:
                        length = end - start
                        values = _loaded(at, kind, length, single)
                        _draw(seed, counter, length, rotated, group, G, 0, turns, random)
                        _keep_groups(values, length, G, shape, minima, ranges, group)
                        _find_codes(values, length, G, 0, minima, ranges, group, dice, top, curve, small)
                        write_codes(small, length, bits, staged, row, start // GROUP)
                    continue
                for first in range(start, end, G):
                    low, high = _TOP, np.int32(~_TOP)
                    for at in range(first, min(first + G, end), BLOCK):
                        length = min(BLOCK, min(first + G, end) - at)
                        read(x, kind, n * D + at, length, single)
                        below, above = _ends(single, 0, length)
                        low, high = min(low, below), max(high, above)
                    at_group = group + (first - start) // G
                    _keep_parameters(low, high, minima, ranges, at_group)
                    if shape == CHOOSES and _can_tell(ranges[at_group]):
                        Z, R = as_float(np.int32(minima[at_group]) << 16), as_float(np.int32(ranges[at_group]) << 16)
                        length = min(SAMPLE, min(first + G, end) - first)
                        read(x, kind, n * D + first, length, single)
                        _tell(_count(single, 0, length, Z, R), ranges, at_group)
                for at in range(start, end, BLOCK):
                    length = min(BLOCK, end - at)
                    read(x, kind, n * D + at, length, single)
                    here = n * groups + at // G
                    _draw(seed, n * width + at // GROUP, length, rotated, here, G, at % G, turns, random)
                    _find_codes(single, length, G, at % G, minima, ranges, here, dice, top, curve, small)
                    write_codes(small, length, bits, staged, row, at // GROUP)

    return build(quantize)


@njit(inline="always")
def _draw(
    seed: Any, counter: Any, length: Any, rotated: Any, group: Any, G: Any, skipped: Any, turns: Any, random: Any
) -> None:
    """Write the 16 bits that each of `length` codes is rounded by: halves if the seed is `NEAREST`.

    The codes begin at the group of the packing `counter`, `skipped` elements into the group `group`.
    """
    if seed == NEAREST:
        random[: (length + 1) // 2] = np.uint32(0x80008000)
    elif rotated == 0:
        random_words(seed, counter, (length + GROUP - 1) // GROUP, random)
    else:
        dice, first = random.view(np.uint16), group // GROUP
        random_words(seed, first, (group + (skipped + length - 1) // G) // GROUP - first + 1, turns)
        drawn = turns.view(np.uint16)[group - first * GROUP :]
        for begin in range(-skipped, length, G):
            start = max(begin, 0)
            count = G if skipped == 0 and length % G == 0 else min(begin + G, length) - start
            turn = np.uint16(drawn[(begin + skipped) // G] + np.uint16((start - begin) * GOLDEN_RATIO))
            here = dice[start : start + count]
            for j in range(count):
                here[j] = np.uint16(turn + np.uint16(np.uint16(j) * np.uint16(GOLDEN_RATIO)))


@njit(inline="always")
def _loaded(at: Any, kind: Any, length: Any, single: Any) -> Any:
    """Return `length` numbers of a kind as float32: in place if they are float32, else converted into `single`."""
    if kind:
        read(at, kind, 0, length, single)
    return vector(at if kind == 0 else np.int64(single.ctypes.data), np.float32(0), length)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _keep_groups(values: Any, length: Any, G: Any, shape: Any, minima: Any, ranges: Any, group: Any) -> None:
    """Store the parameters of `values` as those of the groups from `group` on."""
    for first in range(0, length, G):
        count = G if length % G == 0 else min(G, length - first)
        low, high = _ends(values, first, count)  # pyright: ignore[reportCallIssue]
        at = group + first // G
        _keep_parameters(low, high, minima, ranges, at)  # pyright: ignore[reportCallIssue]
        if shape == CHOOSES and _can_tell(ranges[at]):  # pyright: ignore[reportCallIssue]
            Z, R = as_float(np.int32(minima[at]) << 16), as_float(np.int32(ranges[at]) << 16)  # pyright: ignore[reportCallIssue]
            beyond = _count(values, first, min(count, SAMPLE), Z, R)  # pyright: ignore[reportCallIssue]
            _tell(beyond, ranges, at)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _can_tell(r: Any) -> Any:
    """Return whether a range of these 16 bits can tell the shape of its group's levels."""
    return FIRST_EXPONENT <= r >> 7 < FIRST_EXPONENT + EXPONENTS


@njit(inline="always")
def _count(values: Any, first: Any, count: Any, Z: Any, R: Any) -> Any:
    """Return how many of `count` values are not below 1/64, 1/4 and 3/4 of the range."""
    nothing = np.float32(Z + np.float32(R * _NOTHING))
    below, above = np.float32(Z + np.float32(R * _BELOW)), np.float32(Z + np.float32(R * _ABOVE))
    at_all, some, much = np.int32(0), np.int32(0), np.int32(0)
    here = values[first : first + count]
    for j in range(count):
        at_all += np.int32(here[j] >= nothing)
        some += np.int32(here[j] >= below)
        much += np.int32(here[j] >= above)
    return at_all, some, much


@njit(inline="always")
def _tell(beyond: Any, ranges: Any, at: Any) -> None:
    """Lower the saved range of a group by the shape of the levels that fit it, as reference/per_group.py chooses it."""
    low, middle, high = beyond[0] - beyond[1], beyond[1] - beyond[2], beyond[2]
    if middle > 3 * (low + high):
        ranges[at] = np.uint16(ranges[at] - _NORMAL_LOWERED)
    elif 2 * low > middle + 4 * high:
        ranges[at] = np.uint16(ranges[at] - _SKEWED_LOWERED)


@njit(inline="always")
def _line_of(r: Any, lines: Any, width: Any, given: Any) -> Any:
    """Return the number of knots of a group's levels, their line, and the 16 bits of its range.

    By the 16 bits that were saved, if `given` is not the shape of all groups.
    """
    shape = np.int64(given)
    if given == CHOOSES:
        shape = np.int64(0)
        if r != 0 and r < OTHERWISE_LEAST:
            shape = np.int64(1 if r >> 7 <= EXPONENTS else 2)
            r = np.int32(r + (_NORMAL_LOWERED if shape == 1 else _SKEWED_LOWERED))
    line = lines[2 * shape * width :]
    return np.int64(line[0]), line[1:], r


@njit(inline="always")
def _ends(values: Any, first: Any, count: Any) -> Any:
    """Return the order-preserving keys of the least and the greatest of `values`; those of NaN are beyond all others.

    By their bits, the greatest signed integer is the greatest value, or if no value is positive the least unsigned one;
    the greatest unsigned integer is the least value, or if no value is negative the least one.
    """
    patterns = values.view(np.int32)
    most, unsigned_most, unsigned_least = np.int32(~_TOP), np.uint32(0), np.uint32(0xFFFFFFFF)
    for j in range(first, first + count):
        most = max(most, patterns[j])
        unsigned_most = max(unsigned_most, np.uint32(patterns[j]))
        unsigned_least = min(unsigned_least, np.uint32(patterns[j]))
    least, negative = np.int32(unsigned_least), np.int32(unsigned_most)
    low = np.int32(negative ^ _TOP) if negative < 0 else least
    return low, most if most >= 0 else np.int32(least ^ _TOP)


@njit(inline="always")
def _find_codes(
    values: Any,
    length: Any,
    G: Any,
    skipped: Any,
    minima: Any,
    ranges: Any,
    group: Any,
    dice: Any,
    top: Any,
    curve: Any,
    small: Any,
) -> None:
    """Write the codes of `values`, a byte each, to `small`; they begin `skipped` elements into a group.

    `curve` holds the lines for codes of these bits, their width and the shape, and two arrays to work in.
    """
    lines, width, given, distance, position = curve
    steps = np.float32(top << 16)
    for first in range(-skipped, length, G):
        start = max(first, 0)
        count = G if skipped == 0 and length % G == 0 else min(first + G, length) - start
        z, r = np.int32(minima[group]), np.int32(ranges[group])
        group += 1
        knots, line, r = _line_of(r, lines, width, given)  # pyright: ignore[reportCallIssue]
        here, codes, chances = values[start : start + count], small[start : start + count], dice[start : start + count]
        if r == 0 or r >= 0x8000:  # not finite, constant
            bit = np.uint8(0)
            if r:
                bit = np.uint8((as_bits(here[0] + np.float32(0)) >> 15) & 1)  # pyright: ignore[reportCallIssue]
            for j in range(count):
                codes[j] = bit
        else:
            Z = as_float(z << 16)  # pyright: ignore[reportCallIssue]
            scale = np.float32(steps / as_float(r << 16))  # pyright: ignore[reportCallIssue]
            if knots == 2:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                for j in range(count):
                    d = np.float32(np.float32(here[j] - Z) * scale)
                    y = np.float32(c0 * d) + _bent(d, c1, K1) + _bent(d, c2, K2) + np.float32(0.5)  # pyright: ignore[reportCallIssue]
                    code = np.int32(np.int32(np.int32(y) + np.int32(chances[j])) >> np.int32(16))
                    codes[j] = np.uint8(min(code, top))
                continue
            if knots == 4:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                c3, K3, c4, K4 = line[5], line[6], line[7], line[8]
                for j in range(count):
                    d = np.float32(np.float32(here[j] - Z) * scale)
                    y = np.float32(c0 * d) + _bent(d, c1, K1) + _bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    y = y + _bent(d, c3, K3) + _bent(d, c4, K4) + np.float32(0.5)  # pyright: ignore[reportCallIssue]
                    code = np.int32(np.int32(np.int32(y) + np.int32(chances[j])) >> np.int32(16))
                    codes[j] = np.uint8(min(code, top))
                continue
            if knots:  # of tables
                for j in range(count):
                    distance[j] = np.float32(np.float32(here[j] - Z) * scale)
                    position[j] = np.float32(line[0] * distance[j])
                for k in range(knots):
                    c1, K1 = line[1 + 2 * k], line[2 + 2 * k]
                    for j in range(count):
                        position[j] += _bent(distance[j], c1, K1)  # pyright: ignore[reportCallIssue]
                for j in range(count):
                    code = np.int32(
                        np.int32(np.int32(position[j] + np.float32(0.5)) + np.int32(chances[j])) >> np.int32(16)
                    )
                    codes[j] = np.uint8(min(code, top))
                continue
            for j in range(count):
                y = np.float32(np.float32(here[j] - Z) * scale) + np.float32(0.5)
                code = np.int32(np.int32(np.int32(y) + np.int32(chances[j])) >> np.int32(16))
                codes[j] = np.uint8(min(code, top))


@njit(inline="always")
def _keep_parameters(low: Any, high: Any, minima: Any, ranges: Any, at: Any) -> None:
    """Store what `group_parameters` returns for a group, given the order-preserving keys of its ends."""
    if low < np.int32(~_FINITE) or high > _FINITE:
        minima[at], ranges[at] = np.uint16(0x7FC0), np.uint16(0)
        return
    a = np.float32(as_float(low if low >= 0 else low ^ _TOP) + np.float32(0))
    b = as_float(high if high >= 0 else high ^ _TOP)
    pattern = np.int64(as_bits(a)) & 0xFFFFFFFF
    if a == b:
        minima[at], ranges[at] = np.uint16(pattern >> 16), np.uint16(pattern & 0x7FFF | 0x8000)
        return
    minimum = pattern >> 16
    if a < 0 and pattern & 0xFFFF:
        minimum += 1
    Z = as_float(minimum << 16)
    difference = np.float32(b - Z)
    back = np.float32(difference - b)
    lost = np.float32(np.float32(b - np.float32(difference - back)) + np.float32(-Z - back))
    bits = np.int64(as_bits(max(difference, _LEAST_RANGE)))
    if lost > 0:
        bits += 1
    range_ = (bits + 0xFFFF) >> 16
    if minimum & 0x7F80 == 0x7F80 or range_ >= 0x7F80:
        minimum, range_ = 0x7FC0, 0
    minima[at], ranges[at] = np.uint16(minimum), np.uint16(range_)


@cache
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, D, G = words[1], words[2], words[3], words[6], words[7]
        stretch, count, fixed = words[8], words[9], words[10]
        limit, out, kind = as_float(words[11]), words[12], words[13]
        groups = (D + G - 1) // G
        width = (D + GROUP - 1) // GROUP
        N = blocks // max(count, 1)
        minima = vector(words[4], np.uint16(0), N * groups)
        ranges = vector(words[5], np.uint16(0), N * groups)
        of_samples = vector(words[14], np.uint8(0), N)
        starts = vector(words[15], np.int64(0), N)
        width_of_lines, shape = words[17], words[18]
        lines = vector(words[16], np.float32(0), 54 * width_of_lines)
        size = 4 if kind == 0 else 2
        ahead = BLOCK * 4 if kind == 0 else BLOCK * 2  # past the last block it is useless but harmless
        single = scratch(BLOCK, np.float32(0))
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(_STAGE, np.uint8(0))
        position = scratch(BLOCK, np.float32(0))
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n = block // count
                start = block % count * stretch
                end = min(start + stretch, D)
                bits = fixed if fixed else np.int64(of_samples[n])
                row = packed + (n * width * fixed if fixed else starts[n])
                curve = lines[(bits * 6 + 1) * width_of_lines :], width_of_lines, shape, position
                top = np.float32((1 << bits) - 1)
                for at in range(start, end, BLOCK):
                    length = min(BLOCK, end - at)
                    to = out + (n * D + at) * size
                    prefetch_to_write(to + length * size, ahead)
                    values = vector(to if kind == 0 else np.int64(single.ctypes.data), np.float32(0), length)
                    group = n * groups + at // G
                    if length == BLOCK and G in (USUAL, HALF, QUARTER):
                        read_codes(row, at // GROUP, BLOCK, bits, staged, small)
                        if G == USUAL:
                            _find_values(small, BLOCK, USUAL, 0, minima, ranges, group, top, limit, curve, values)
                        elif G == HALF:
                            _find_values(small, BLOCK, HALF, 0, minima, ranges, group, top, limit, curve, values)
                        else:
                            _find_values(small, BLOCK, QUARTER, 0, minima, ranges, group, top, limit, curve, values)
                    else:
                        read_codes(row, at // GROUP, length, bits, staged, small)
                        _find_values(small, length, G, at % G, minima, ranges, group, top, limit, curve, values)
                    if kind:
                        write(to, kind, 0, length, single)

    return build(dequantize)


@njit(inline="always")
def _find_values(
    small: Any,
    length: Any,
    G: Any,
    skipped: Any,
    minima: Any,
    ranges: Any,
    group: Any,
    top: Any,
    limit: Any,
    curve: Any,
    values: Any,
) -> None:
    """Write the dequantized codes of `small` to `values`; they begin `skipped` elements into a group.

    `curve` holds the lines for codes of these bits, their width and the shape, and an array to work in.
    """
    lines, width, given, position = curve
    patterns = values.view(np.int32)
    for first in range(-skipped, length, G):
        start = max(first, 0)
        count = G if skipped == 0 and length % G == 0 else min(first + G, length) - start
        z, r = np.int32(minima[group]), np.int32(ranges[group])
        group += 1
        knots, line, r = _line_of(r, lines, width, given)  # pyright: ignore[reportCallIssue]
        codes = small[start : start + count]
        if r >= 0x8000:
            shown = patterns[start : start + count]
            pattern = np.int32(z << 16 | np.int32(codes[0]) << 15 | r & 0x7FFF)
            for j in range(count):
                shown[j] = pattern
        else:
            here = values[start : start + count]
            Z = as_float(z << 16)  # pyright: ignore[reportCallIssue]
            step = np.float32(as_float(r << 16) / top)  # pyright: ignore[reportCallIssue]
            if knots == 2:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                for j in range(count):
                    d = np.float32(codes[j])
                    y = np.float32(c0 * d) + _bent(d, c1, K1) + _bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    here[j] = np.float32(Z + np.float32(y * step))
            elif knots == 4:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                c3, K3, c4, K4 = line[5], line[6], line[7], line[8]
                for j in range(count):
                    d = np.float32(codes[j])
                    y = np.float32(c0 * d) + _bent(d, c1, K1) + _bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    y = y + _bent(d, c3, K3) + _bent(d, c4, K4)  # pyright: ignore[reportCallIssue]
                    here[j] = np.float32(Z + np.float32(y * step))
            elif knots:  # of tables
                for j in range(count):
                    position[j] = np.float32(line[0] * np.float32(codes[j]))
                for k in range(knots):
                    c1, K1 = line[1 + 2 * k], line[2 + 2 * k]
                    for j in range(count):
                        position[j] += _bent(np.float32(codes[j]), c1, K1)  # pyright: ignore[reportCallIssue]
                for j in range(count):
                    here[j] = np.float32(Z + np.float32(position[j] * step))
            else:
                for j in range(count):
                    here[j] = np.float32(Z + np.float32(np.float32(codes[j]) * step))
            _cut(here, count, Z, as_float(r << 16), limit)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _bent(d: Any, c: Any, K: Any) -> Any:
    """Return what a knot at `K` adds to a curve."""
    return np.float32(c * max(np.float32(d - K), np.float32(0)))


@njit(inline="always")
def _cut(values: Any, count: Any, Z: Any, R: Any, limit: Any) -> None:
    """Cut the values of a group to `limit`, the greatest finite number of its dtype, unless all are well within."""
    if not np.float32(abs(Z) + R) < np.float32(limit * np.float32(0.5)):
        for j in range(count):
            value = limit if values[j] > limit else values[j]
            values[j] = -limit if value < -limit else value
