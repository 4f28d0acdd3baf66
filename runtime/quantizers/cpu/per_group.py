"""Per-group quantization on the CPU. The arithmetic is the reference's (per_group.py), step by step."""

from functools import cache
from math import lcm
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...backends.team import JOB_WORDS, Kernel, run
from ..common import KINDS, largest
from ..rows import Rows
from .pieces import (
    GROUP,
    as_bits,
    as_float,
    build,
    prefetch_to_read,
    prefetch_to_write,
    random_words,
    read,
    read_codes,
    take,
    vector,
    write,
    write_codes,
)

# Elements worked on at once. Fewer take more time for what begins and ends with each block, more spoil the cache.
BLOCK = 1024

_TOP = np.int32(0x7FFFFFFF)
_FINITE = np.int32(0x7F7FFFFF)


def quantize(x: Tensor, bits: int | Tensor, group_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, minima and ranges of `x` (N, D), as `PerGroupCompressed` keeps them."""
    N, D = x.shape
    G = max(1, min(group_size, D))
    groups = -(-D // G)
    minimum, range_ = torch.empty(2, N, groups, dtype=torch.bfloat16, device="cpu").unbind()
    stretch, count = _stretches(D, G)
    fixed, of_samples, starts = _bits(Rows(N, D, bits))
    if starts is None:
        packed = torch.empty(N, -(-D // GROUP) * fixed, dtype=torch.uint8, device="cpu")
    else:
        packed = torch.zeros(int(starts[-1]), dtype=torch.uint8, device="cpu")
    arguments = (x.data_ptr(), KINDS[x.dtype], D, G, stretch, count, fixed, seed, packed.data_ptr())
    places = (of_samples, 0 if starts is None else starts.data_ptr())
    run(_quantizer(), N * count, *arguments, minimum.data_ptr(), range_.data_ptr(), *places)
    return packed, minimum, range_


def dequantize(
    packed: Tensor, minimum: Tensor, range_: Tensor, bits: int | Tensor, group_size: int, out: Tensor
) -> None:
    """Write the values of the codes to `out` (N, D)."""
    if out.dtype not in KINDS:
        single = torch.empty(out.shape, dtype=torch.float32, device="cpu")
        dequantize(packed, minimum, range_, bits, group_size, single)
        out.copy_(single)
        return
    N, D = out.shape
    G = max(1, min(group_size, D))
    stretch, count = _stretches(D, G)
    fixed, of_samples, starts = _bits(Rows(N, D, bits))
    limit = np.float32(largest(out.dtype)).view(np.int32)
    arguments = (packed.data_ptr(), minimum.data_ptr(), range_.data_ptr(), D, G, stretch, count, fixed, int(limit))
    places = (of_samples, 0 if starts is None else starts.data_ptr())
    run(_dequantizer(), N * count, *arguments, out.data_ptr(), KINDS[out.dtype], *places)


def _bits(rows: Rows) -> tuple[int, int, Tensor | None]:
    """Return the bits of all samples, or 0; or the address of those of each, and the first byte of each."""
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
        whole = stretch <= BLOCK  # then a block holds all of a stretch, and is read once
        values = np.empty(BLOCK, np.float32)
        patterns = values.view(np.int32)
        random = np.empty(BLOCK // 2, np.uint32)
        halves = random.view(np.uint16)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
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
                top = np.int32((1 << bits) - 1)
                steps = np.float32(top << 16)
                if whole:
                    read(x, kind, n * D + start, end - start, values)
                    size = 4 if kind == 0 else 2
                    ahead = min(BLOCK, (N - n) * D - end)
                    prefetch_to_read(x + (n * D + end) * size, ahead * size)
                for group in range(start // G, (end + G - 1) // G):
                    low, high = _TOP, np.int32(~_TOP)
                    group_end = min((group + 1) * G, end)
                    for at in range(group * G, group_end, BLOCK):
                        length = min(BLOCK, group_end - at)
                        here = at - start
                        if not whole:
                            read(x, kind, n * D + at, length, values)
                            here = 0
                        for pattern in patterns[here : here + length]:
                            key = np.int32(pattern ^ (np.int32(pattern >> np.int32(31)) & _TOP))
                            low = min(low, key)
                            high = max(high, key)
                    _keep_parameters(low, high, minima, ranges, n * groups + group)
                for at in range(start, end, BLOCK):
                    length = min(BLOCK, end - at)
                    if not whole:
                        read(x, kind, n * D + at, length, values)
                    random_words(seed, n * width + at // GROUP, (length + GROUP - 1) // GROUP, random)
                    position = at
                    while position < at + length:
                        group = position // G
                        stop = min((group + 1) * G, at + length)
                        z, r = np.int32(minima[n * groups + group]), np.int32(ranges[n * groups + group])
                        here = values[position - at : stop - at]
                        codes = small[position - at : stop - at]
                        if r == 0 or r >= 0x8000:  # not finite, constant
                            bit = np.uint8(0)
                            if r:
                                bit = np.uint8((as_bits(here[0] + np.float32(0)) >> 15) & 1)
                            for j in range(stop - position):
                                codes[j] = bit
                        else:
                            Z = as_float(z << 16)
                            scale = np.float32(steps / as_float(r << 16))
                            dice = halves[position - at : stop - at]
                            for j in range(stop - position):
                                y = np.float32(np.float32(here[j] - Z) * scale) + np.float32(0.5)
                                code = np.int32(np.int32(np.int32(y) + np.int32(dice[j])) >> np.int32(16))
                                codes[j] = np.uint8(min(code, top))
                        position = stop
                    write_codes(small, length, bits, staged, row, at // GROUP)

    return build(quantize)


@njit(inline="always")
def _keep_parameters(low: Any, high: Any, minima: Any, ranges: Any, at: Any) -> None:
    """Keep what `group_parameters` returns of a group, given the order-preserving keys of its ends."""
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
    bits = np.int64(as_bits(max(difference, np.float32(2.0**-100))))
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
        values = np.empty(BLOCK, np.float32)
        patterns = values.view(np.int32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
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
                top = np.float32((1 << bits) - 1)
                for at in range(start, end, BLOCK):
                    length = min(BLOCK, end - at)
                    size = 4 if kind == 0 else 2
                    ahead = min(BLOCK, (N - n) * D - at - length)
                    prefetch_to_write(out + (n * D + at + length) * size, ahead * size)
                    read_codes(row, at // GROUP, length, bits, staged, small)
                    position = at
                    while position < at + length:
                        group = position // G
                        stop = min((group + 1) * G, at + length)
                        z, r = np.int32(minima[n * groups + group]), np.int32(ranges[n * groups + group])
                        codes = small[position - at : stop - at]
                        if r >= 0x8000:
                            shown = patterns[position - at : stop - at]
                            pattern = np.int32(z << 16 | np.int32(codes[0]) << 15 | r & 0x7FFF)
                            for j in range(stop - position):
                                shown[j] = pattern
                        else:
                            Z = as_float(z << 16)
                            step = np.float32(as_float(r << 16) / top)
                            here = values[position - at : stop - at]
                            for j in range(stop - position):
                                value = np.float32(Z + np.float32(np.float32(codes[j]) * step))
                                value = limit if value > limit else value
                                here[j] = -limit if value < -limit else value
                        position = stop
                    write(out, kind, n * D + at, length, values)

    return build(dequantize)
