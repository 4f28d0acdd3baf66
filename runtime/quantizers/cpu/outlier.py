"""Outlier quantization on the CPU: the outliers are found by a bracket, not by selecting among all elements.

A sample tells a threshold that is almost surely a little too low. One pass writes down the elements above it, and finds
the range of the others; the exact threshold is selected among these few. Where the sample misled, the reference
selects.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...backends.team import JOB_WORDS, Kernel, parts_of, run
from ...packing import packed_size
from ..common import BLOCK, KINDS, largest, smallest
from .pieces import GROUP, as_float, build, read, read_codes, take, vector, write, write_codes

if TYPE_CHECKING:
    from ..outlier import Outlier, OutlierCompressed

_SAMPLE = 1 << 16
_LEAST = 1 << 12  # elements; for fewer the reference is as fast
_TOP = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NAN = np.int32(0x7F800001)  # any: conversions from float16 may change what a NaN carries
_POSITION_BLOCK = 240


def select(x: Tensor, quantizer: "Outlier") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `select_reference` does: positions and values of outliers, least and greatest of the rest."""
    from ..outlier import magnitudes, sampled_threshold, select_reference

    n, k = x.numel(), quantizer.count(x.numel())
    if n < _LEAST:
        return select_reference(x, quantizer)
    if quantizer.sample_every > 1:
        bound = sampled_threshold(magnitudes(x[:: quantizer.sample_every], quantizer.relu), quantizer)
    else:
        stride = max(4, n // _SAMPLE) | 1  # odd: an even one may see the same column of every image, at its edge
        bound = _lower_bound(magnitudes(x[::stride], quantizer.relu).numpy(), k / n) if k else int(_TOP)
    expected = k + _room(k) if quantizer.sample_every == 1 else 2 * k
    positions, values, total, low, high = _survey(x, quantizer.relu, bound, expected)
    if total == n or (quantizer.sample_every == 1 and total < k):
        return select_reference(x, quantizer)
    if positions.size < total:  # the sample misled, but the right way
        positions, values, _, low, high = _survey(x, quantizer.relu, bound, total, slack=n)
    if quantizer.sample_every == 1 and total > k:
        keys = np.minimum(values.view(np.int32) & _TOP, _NAN)
        threshold = np.partition(keys, total - k)[total - k]
        keep = keys > threshold
        keep[np.flatnonzero(keys == threshold)[: k - np.count_nonzero(keep)]] = True
        left = torch.from_numpy(values[~keep])
        low, high = torch.minimum(low, left.amin()), torch.maximum(high, left.amax())
        positions, values = positions[keep], values[keep]
    return torch.from_numpy(positions), torch.from_numpy(values), low, high


def _lower_bound(sample: np.ndarray, share: float) -> int:
    """Return a magnitude that almost surely no more than four deviations above that `share` of all exceed."""
    expected = sample.size * share
    rank = int(expected + 4 * expected**0.5 + 8)
    return int(np.partition(sample, sample.size - rank)[sample.size - rank]) - 1 if rank < sample.size else -1


def quantize(x: Tensor, levels: Tensor, bits: int, relu: bool) -> Tensor:
    """Return the packed codes of `x` (n,)."""
    n = x.numel()
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    least, step = levels
    line = torch.stack([least, 1 / step]).view(torch.int32).tolist()
    run(_quantizer(), -(-n // BLOCK), x.data_ptr(), KINDS[x.dtype], n, *line, int(relu), bits, packed.data_ptr())
    return packed


def dequantize(compressed: "OutlierCompressed", out: Tensor) -> None:
    """Write the values of the codes, and the outliers, to `out` (n,)."""
    n = out.numel()
    relu = compressed.quantizer.relu
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device="cpu")
        dequantize(compressed, single)
        out.copy_(single)
        return
    counts, offsets = compressed.counts, compressed.offsets
    ends = counts.cumsum(0)
    values = compressed.values.float()
    line = torch.tensor([largest(out.dtype), smallest(out.dtype) if relu else -largest(out.dtype)], device="cpu")
    line = torch.cat([compressed.levels, line])
    arguments = (compressed.packed.data_ptr(), n, compressed.quantizer.bits, line.data_ptr())
    outliers = (counts.data_ptr(), ends.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel())
    run(
        _dequantizer(),
        -(-n // (2 * _POSITION_BLOCK)),
        *arguments,
        *outliers,
        out.data_ptr(),
        KINDS[out.dtype],
        int(relu),
    )


def _room(k: int) -> int:
    """Return how many more than `k` may be above `_lower_bound`, as a rule."""
    return k // 4 + 1024


def _survey(
    x: Tensor, relu: bool, bound: int, expected: int, slack: int = 0
) -> tuple[np.ndarray, np.ndarray, int, Tensor, Tensor]:
    """Return positions and values of the magnitudes above `bound`, in order, and the range of all others.

    Returns:
        positions: int64 (m,); m is less than their number if some part of x has far more than its share of `expected`.
        values: float32 (m,).
        total: their number.
        low, high: least and greatest of the others, float32 ().
    """
    n = x.numel()
    blocks = -(-n // BLOCK)
    parts = parts_of(blocks)
    # Whoever runs ahead of its share goes without room: what is there for each part is twice its share.
    room = min(n, max((expected if parts == 1 else 2 * expected // parts) + BLOCK, slack))
    found = np.empty((3, blocks), np.int32)
    positions, values = np.empty(parts * room, np.int64), np.empty(parts * room, np.float32)
    used = np.zeros(parts, np.int64)
    targets = (positions.ctypes.data, values.ctypes.data, room, used.ctypes.data)
    run(_surveyor(), blocks, x.data_ptr(), KINDS[x.dtype], n, int(relu), bound, found.ctypes.data, *targets)
    total = int(found[0].sum())
    if parts > 1:
        kept = [slice(i * room, i * room + int(used[i])) for i in range(parts)]
        positions, values = (np.concatenate([whole[part] for part in kept]) for whole in (positions, values))
    else:
        positions, values = positions[: used[0]], values[: used[0]]
    ends = torch.from_numpy(np.array([found[1].min(), found[2].max()]))
    if int(ends[0]) > int(ends[1]):  # there are no others
        return positions, values, total, torch.zeros(()), torch.zeros(())
    low, high = torch.where(ends < 0, ends ^ int(_TOP), ends).view(torch.float32)
    return positions, values, total, low, high


@cache
def _surveyor() -> Kernel:
    def survey(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, relu = words[1], words[2], words[3], words[4], words[5], words[6]
        bound = np.int32(words[7])
        found = vector(words[8], np.int32(0), 3 * blocks)
        room = words[11]
        positions = vector(words[9], np.int64(0), parts * room)
        picked = vector(words[10], np.float32(0), parts * room)
        used = vector(words[12], np.int64(0), parts)
        values = np.empty(BLOCK, np.float32)
        patterns = values.view(np.int32)
        above = np.zeros(BLOCK, np.uint8)
        eights = above.view(np.uint64)
        places = np.empty(BLOCK + 1, np.int32)
        dropped = np.int32(~_TOP) if relu else np.int32(0)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, end = part * room, part * room + room
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                read(x, kind, block * BLOCK, count, values)
                above[count:] = 0
                many, low, high = np.int32(0), _TOP, np.int32(~_TOP)
                for j in range(count):
                    pattern = patterns[j]
                    magnitude = np.int32(pattern & _TOP)
                    key = np.int32(pattern ^ (np.int32(pattern >> np.int32(31)) & _TOP))
                    # With relu the magnitude of a negative number is 0, of a NaN that of NaN.
                    measured = np.int32(0) if pattern & dropped and magnitude <= _INFINITY else min(magnitude, _NAN)
                    large = measured > bound
                    many = np.int32(many + (np.int32(1) if large else np.int32(0)))
                    low = min(low, _TOP if large else key)
                    high = max(high, np.int32(~_TOP) if large else key)
                found[block], found[blocks + block], found[2 * blocks + block] = many, low, high
                if many == 0 or at + many > end:
                    continue
                for j in range(count):  # a loop of its own: bytes and words in one are slow
                    pattern = patterns[j]
                    magnitude = np.int32(pattern & _TOP)
                    measured = np.int32(0) if pattern & dropped and magnitude <= _INFINITY else min(magnitude, _NAN)
                    above[j] = np.uint8(1) if measured > bound else np.uint8(0)
                m = 0
                for g in range(BLOCK // GROUP):
                    if eights[g]:
                        for j in range(g * GROUP, g * GROUP + GROUP):  # every place is written, most are written over
                            places[m] = j
                            m += np.int64(above[j])
                for i in range(m):
                    positions[at + i] = block * BLOCK + places[i]
                    picked[at + i] = values[places[i]]
                at += m
            used[part] = at - part * room

    return build(survey)


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n = words[1], words[2], words[3], words[4], words[5]
        least, inverse, relu, bits, packed = as_float(words[6]), as_float(words[7]), words[8], words[9], words[10]
        top = np.float32((1 << bits) - 1)
        bottom = np.float32(1 if relu else 0)
        shift = np.float32(1.5 if relu else 0.5)
        values = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                read(x, kind, block * BLOCK, count, values)
                for j in range(count):
                    y = np.float32(np.float32(values[j] - least) * inverse) + shift
                    y = y if y > bottom else bottom
                    small[j] = np.uint8(np.int32(y if y < top else top))
                if relu:
                    for j in range(count):
                        small[j] = small[j] if values[j] > np.float32(0) else np.uint8(0)
                write_codes(small, count, bits, staged, packed, block * (BLOCK // GROUP))

    return build(quantize)


@cache
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, n, bits = words[1], words[2], words[3], words[4], words[5]
        line = vector(words[6], np.float32(0), 4)
        least, step, most, fewest = line[0], line[1], line[2], line[3]
        zero = np.float32(0) * step
        relu = words[14] != 0
        first = np.float32(1 if relu else 0)
        length = (n + _POSITION_BLOCK - 1) // _POSITION_BLOCK
        counts = vector(words[7], np.uint8(0), length)
        ends = vector(words[8], np.int64(0), length)
        offsets = vector(words[9], np.uint8(0), words[11])
        outliers = vector(words[10], np.float32(0), words[11])
        out, kind = words[12], words[13]
        values = np.empty(2 * _POSITION_BLOCK, np.float32)
        small = np.empty(2 * _POSITION_BLOCK, np.uint8)
        staged = np.zeros(2 * _POSITION_BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * 2 * _POSITION_BLOCK
                count = min(2 * _POSITION_BLOCK, n - start)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                for j in range(count):
                    y = least + (np.float32(small[j]) - first) * step
                    y = most if y > most else y
                    values[j] = fewest if y < fewest else y
                if relu:
                    for j in range(count):
                        values[j] = values[j] if small[j] else zero
                for half in range(2 * block, min(2 * block + 2, length)):
                    base = half * _POSITION_BLOCK - start
                    for i in range(ends[half] - np.int64(counts[half]), ends[half]):
                        values[base + np.int64(offsets[i])] = outliers[i]
                write(out, kind, start, count, values)

    return build(dequantize)
