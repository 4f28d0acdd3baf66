"""Outlier quantization on the CPU: the outliers are found by a bracket, not by selecting among all elements.

A sample tells a threshold that is almost surely a little too low. One pass counts the elements from there on, in each
block, and finds the range of the others; one more writes the candidates down; the exact threshold is selected among
these few. Where the sample misled, the reference selects.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...backends.team import JOB_WORDS, Kernel, run
from ...packing import packed_size
from ..common import BLOCK, KINDS
from .pieces import GROUP, as_float, build, read, read_codes, take, vector, write, write_codes

if TYPE_CHECKING:
    from ..outlier import Outlier, OutlierCompressed

_SAMPLE = 1 << 15
_TOP = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_POSITION_BLOCK = 240


def select(x: Tensor, quantizer: "Outlier") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `select_reference` does: positions and values of outliers, least and greatest of the rest."""
    from ..outlier import magnitudes, sampled_threshold, select_reference

    n, k = x.numel(), quantizer.count(x.numel())
    if n < 4 * _SAMPLE:
        return select_reference(x, quantizer)
    if quantizer.sample_every > 1:
        bound = sampled_threshold(magnitudes(x[:: quantizer.sample_every], quantizer.relu), quantizer)
    else:
        bound = _lower_bound(magnitudes(x[:: n // _SAMPLE], quantizer.relu).numpy(), k / n) if k else int(_TOP)
    counts, low, high = _survey(x, quantizer.relu, bound)
    total = int(counts.sum())
    if total == n or (quantizer.sample_every == 1 and total < k):
        return select_reference(x, quantizer)
    positions, values = _collect(x, quantizer.relu, bound, counts, total)
    if quantizer.sample_every == 1 and total > k:
        keys = values.view(np.int32) & _TOP
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


def dequantize(compressed: "OutlierCompressed", levels: Tensor, out: Tensor) -> None:
    """Write the values of the codes, and the outliers, to `out` (n,)."""
    n = out.numel()
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device="cpu")
        dequantize(compressed, levels, single)
        out.copy_(single)
        return
    counts, offsets = compressed.counts, compressed.offsets
    ends = counts.cumsum(0)
    values = compressed.values.float()
    arguments = (compressed.packed.data_ptr(), n, compressed.quantizer.bits, levels.data_ptr())
    outliers = (counts.data_ptr(), ends.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel())
    run(_dequantizer(), -(-n // (2 * _POSITION_BLOCK)), *arguments, *outliers, out.data_ptr(), KINDS[out.dtype])


def _survey(x: Tensor, relu: bool, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return in each block how many magnitudes are above `bound`, and the least and greatest of all others."""
    n = x.numel()
    blocks = -(-n // BLOCK)
    found = torch.empty(3, blocks, dtype=torch.int32, device="cpu")
    run(_surveyor(), blocks, x.data_ptr(), KINDS[x.dtype], n, int(relu), bound, found.data_ptr())
    ends = torch.stack([found[1].amin(), found[2].amax()])
    if int(ends[0]) > int(ends[1]):  # there are no others
        return found[0], torch.zeros(()), torch.zeros(())
    low, high = torch.where(ends < 0, ends ^ int(_TOP), ends).view(torch.float32)
    return found[0], low, high


def _collect(x: Tensor, relu: bool, bound: int, counts: Tensor, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and values of the elements that `_survey` counted, in order: int64 and float32 (total,)."""
    n = x.numel()
    starts = counts.cumsum(0) - counts
    positions, values = np.empty(total, np.int64), np.empty(total, np.float32)
    targets = (starts.data_ptr(), positions.ctypes.data, values.ctypes.data, total)
    run(_collector(), -(-n // BLOCK), x.data_ptr(), KINDS[x.dtype], n, int(relu), bound, *targets)
    return positions, values


@cache
def _surveyor() -> Kernel:
    def survey(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, relu = words[1], words[2], words[3], words[4], words[5], words[6]
        bound = np.int32(words[7])
        found = vector(words[8], np.int32(0), 3 * blocks)
        values = np.empty(BLOCK, np.float32)
        patterns = values.view(np.int32)
        dropped = np.int32(~_TOP) if relu else np.int32(0)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                read(x, kind, block * BLOCK, count, values)
                many, low, high = np.int32(0), _TOP, np.int32(~_TOP)
                for j in range(count):
                    pattern = patterns[j]
                    magnitude = np.int32(pattern & _TOP)
                    key = np.int32(pattern ^ (np.int32(pattern >> np.int32(31)) & _TOP))
                    # With relu the magnitude of a negative number is 0, of a NaN that of NaN.
                    measured = np.int32(0) if pattern & dropped and magnitude <= _INFINITY else magnitude
                    above = measured > bound
                    many = np.int32(many + (np.int32(1) if above else np.int32(0)))
                    low = min(low, _TOP if above else key)
                    high = max(high, np.int32(~_TOP) if above else key)
                found[block], found[blocks + block], found[2 * blocks + block] = many, low, high

    return build(survey)


@cache
def _collector() -> Kernel:
    def collect(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, relu = words[1], words[2], words[3], words[4], words[5], words[6]
        bound = np.int32(words[7])
        starts = vector(words[8], np.int64(0), blocks)
        positions = vector(words[9], np.int64(0), words[11])
        found = vector(words[10], np.float32(0), words[11])
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
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                read(x, kind, block * BLOCK, count, values)
                above[count:] = 0
                for j in range(count):
                    pattern = patterns[j]
                    magnitude = np.int32(pattern & _TOP)
                    measured = np.int32(0) if pattern & dropped and magnitude <= _INFINITY else magnitude
                    above[j] = np.uint8(1) if measured > bound else np.uint8(0)
                many = 0
                for g in range(BLOCK // GROUP):
                    if eights[g]:
                        for j in range(g * GROUP, g * GROUP + GROUP):  # every place is written, most are written over
                            places[many] = j
                            many += np.int64(above[j])
                start = starts[block]
                for i in range(many):
                    positions[start + i] = block * BLOCK + places[i]
                    found[start + i] = values[places[i]]

    return build(collect)


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
        levels = vector(words[6], np.float32(0), 1 << bits)
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
                    values[j] = levels[small[j]]
                for half in range(2 * block, min(2 * block + 2, length)):
                    base = half * _POSITION_BLOCK - start
                    for i in range(ends[half] - np.int64(counts[half]), ends[half]):
                        values[base + np.int64(offsets[i])] = outliers[i]
                write(out, kind, start, count, values)

    return build(dequantize)
