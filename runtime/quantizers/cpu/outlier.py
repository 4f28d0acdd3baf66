"""Outlier quantization on the CPU: the outliers are found by a bracket, not by selecting among all elements.

A sample tells a threshold that is almost surely a little too low. One pass over x, 64 elements to a word of bits, notes
those above it (candidates) and finds the range of the others; the exact threshold is selected among these few, and they
are settled: outliers, or left to the rest. Where the sample misled, the reference selects.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic
from torch import Tensor

from ...backends.team import JOB_WORDS, Kernel, parts_of, run
from ...packing import packed_size
from ..common import BLOCK, KINDS, largest, smallest
from .pieces import (
    GROUP,
    as_float,
    build,
    prefetch_to_write,
    read,
    read_codes,
    take,
    vector,
    write,
    write_codes,
)

if TYPE_CHECKING:
    from ..outlier import Outlier, OutlierCompressed, Selection

_SAMPLE = 1 << 13
_LEAST = 1 << 12  # elements; for fewer the reference is as fast
_TOP = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NAN = np.int32(0x7F800001)  # any: conversions from float16 may change what a NaN carries
_POSITION_BLOCK = 240
_LANES = 16  # of a vector of the survey
_WORD = 64
_HALF_LARGEST, _BRAIN_LARGEST = (np.float32(largest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_SMALLEST, _BRAIN_SMALLEST = (np.float32(smallest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_LOST, _BRAIN_LOST = np.float32(2.0**-25), np.float32(2.0**-134)  # the greatest that are rounded to 0
_SPAN = 4 * _POSITION_BLOCK  # elements surveyed at once: whole words of 64, and whole blocks of positions


def select(x: Tensor, quantizer: "Outlier") -> "Selection":
    """Return what `select_reference` does."""
    from ..outlier import sampled_threshold, select_reference

    n, k = x.numel(), quantizer.count(x.numel())
    if n < _LEAST:
        return select_reference(x, quantizer)
    exact = quantizer.sample_every == 1
    if exact:
        bound, expected = _bracket(x, quantizer.relu, k) if k else (int(_TOP), 0)
    else:
        sample = torch.from_numpy(_sample(x, quantizer.relu, quantizer.sample_every))
        bound, expected = sampled_threshold(sample, quantizer), k
    if bound < 0:
        return select_reference(x, quantizer)
    candidates = _survey(x, quantizer.relu, bound, expected)
    total = int(candidates.used.sum())
    if total == n or (exact and total < k):
        return select_reference(x, quantizer)
    if not exact or total == k:
        return _settle(x, quantizer, candidates, bound, candidates.used, np.zeros_like(candidates.used))
    keys = candidates.keys()
    threshold = np.partition(keys, total - k)[total - k]
    above, equal = (candidates.by_part(np.flatnonzero(those)) for those in (keys > threshold, keys == threshold))
    taken = np.minimum(equal.cumsum(), k - above.sum())  # of those at the threshold, the first
    return _settle(x, quantizer, candidates, int(threshold), above, np.diff(taken, prepend=0))


def _sample(x: Tensor, relu: bool, stride: int) -> np.ndarray:
    """Return the magnitudes (outlier.py) of every `stride`-th element of `x`: int32."""
    keys = np.empty(-(-x.numel() // stride), np.int32)
    run(_sampler(), 1, x.data_ptr(), KINDS[x.dtype], stride, int(relu), keys.ctypes.data, keys.size)
    return keys


def _bracket(x: Tensor, relu: bool, k: int) -> tuple[int, int]:
    """Return a magnitude that almost surely `k` elements exceed; −1 for none. And how many do, as a rule at most."""
    n = x.numel()
    sample = _sample(x, relu, max(4, n // _SAMPLE) | 1)  # odd: an even stride may see one column of every image
    share = k / n * sample.size
    rank = int(share + 4 * share**0.5 + 8)  # four deviations
    if rank >= sample.size:
        return -1, n
    sample.partition(sample.size - rank)
    return int(sample[sample.size - rank]) - 1, int((rank + 4 * rank**0.5) / sample.size * n)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The elements whose magnitude is above a bound, in order, a stretch of memory for each part of the job.

    Attributes:
        starts: where the stretches begin, int64 (parts + 1,).
        used: how many elements each part has, int64 (parts,).
        found: and each span of 960, int32.
        places: of each in its span, uint16.
        picked: its value, float32.
        low, high: least and greatest key (`_key`) of all other elements.
    """

    starts: np.ndarray
    used: np.ndarray
    found: np.ndarray
    places: np.ndarray
    picked: np.ndarray
    low: int
    high: int

    def keys(self) -> np.ndarray:
        """Return their magnitudes (outlier.py): int32."""
        stretches = zip(self.starts.tolist(), self.used.tolist(), strict=False)
        patterns = self.picked.view(np.int32)
        keys = np.concatenate([patterns[start : start + used] for start, used in stretches])
        keys &= _TOP
        return np.minimum(keys, _NAN, out=keys)

    def by_part(self, chosen: np.ndarray) -> np.ndarray:
        """Return how many of those `chosen`, increasing indices into `keys()`, each part has: int64 (parts,)."""
        return np.diff(np.searchsorted(chosen, self.used.cumsum()), prepend=0)


def _survey(x: Tensor, relu: bool, bound: int, expected: int) -> _Candidates:
    """Return the candidates of `x`, of which about so many are `expected`."""
    n = x.numel()
    blocks = -(-n // _SPAN)
    parts = parts_of(blocks)
    found, used = np.empty(blocks, np.int32), np.empty(parts, np.int64)
    ends = np.empty((parts, 2, _LANES), np.int32)
    bound = bound if bound < _NAN else int(_TOP)
    # Negative numbers are above the bound if their patterns are above this, as unsigned integers; with relu only NaN.
    negative = ~int(_TOP) | (max(bound, int(_INFINITY)) if relu else bound)

    def survey(starts: np.ndarray) -> _Candidates:
        places, picked = np.empty(starts[-1], np.uint16), np.empty(starts[-1], np.float32)
        targets = (a.ctypes.data for a in (found, starts, used, places, picked, ends))
        run(_surveyor(), blocks, x.data_ptr(), KINDS[x.dtype], n, bound, negative, *targets)
        return _Candidates(starts, used, found, places, picked, int(ends[:, 0].min()), int(ends[:, 1].max()))

    # Twice the share of each part, for they need not be alike.
    candidates = survey(np.arange(parts + 1) * (min(n, expected if parts == 1 else 2 * expected // parts) + _SPAN))
    if (used <= np.diff(candidates.starts)).all():
        return candidates
    return survey(np.concatenate([[0], used.cumsum()]))


def _settle(
    x: Tensor, quantizer: "Outlier", candidates: _Candidates, threshold: int, above: np.ndarray, equal: np.ndarray
) -> "Selection":
    """Return for outliers the candidates above `threshold`, and of those at it the first `equal` of each part.

    Args:
        above, equal: numbers of both in each part of the survey, int64 (parts,).
    """
    from ..outlier import Selection

    kept = above + equal
    firsts = np.concatenate([[0], kept.cumsum()])
    counts = torch.empty(-(-x.numel() // _POSITION_BLOCK), dtype=torch.uint8, device="cpu")
    offsets = torch.empty(int(firsts[-1]), dtype=torch.uint8, device="cpu")
    values = torch.empty(offsets.shape, dtype=quantizer.value_dtype or x.dtype, device="cpu")
    c = candidates
    ends = np.empty((2, kept.size), np.int32)
    table = np.stack([c.starts[:-1], firsts[:-1], equal])
    sources = (a.ctypes.data for a in (c.found, c.places, c.picked, table))
    targets = (counts.data_ptr(), counts.numel(), offsets.data_ptr(), values.data_ptr(), KINDS[values.dtype])
    run(_settler(), c.found.size, *sources, *targets, offsets.numel(), threshold, ends.ctypes.data)
    low, high = min(c.low, int(ends[0].min())), max(c.high, int(ends[1].max()))
    if low > high:  # all are outliers
        low = high = 0
    elif low < ~int(_INFINITY):  # a negative NaN, least of all: it shall make both NaN
        high = int(_NAN)
    line = np.array([low, high], np.int32)
    line = np.where(line < 0, line ^ _TOP, line).view(np.float32)
    return Selection(counts, offsets, values, _levels(line[0], line[1], quantizer))


def _levels(low: np.float32, high: np.float32, quantizer: "Outlier") -> Tensor:
    """Return what `levels_reference` does: torch takes ten times as long for numbers one by one."""
    from ..outlier import LEAST_SPAN, steps_of

    low = np.float32(0) if quantizer.relu else low
    with np.errstate(over="ignore", invalid="ignore"):
        span = high - low
    levels = np.full(2, np.nan, np.float32)
    if np.isfinite(span):
        levels[:] = low, max(span, np.float32(LEAST_SPAN)) / np.float32(steps_of(quantizer))
    return torch.from_numpy(levels)


def quantize(x: Tensor, levels: Tensor, bits: int, relu: bool) -> Tensor:
    """Return the packed codes of `x` (n,)."""
    n = x.numel()
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    least, step = levels.numpy()
    line = np.array([least, np.float32(1) / step], np.float32).view(np.int32).tolist()
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


@intrinsic
def _above(typingctx: Any, address: Any, bound: Any, negative: Any, ends: Any) -> Any:
    """Return 64 bits: whose of the float32 numbers at an address the magnitude is above a bound.

    Those are the patterns above `bound` as signed integers, or above `negative` as unsigned. The least and greatest
    keys of the others are kept at the address `ends`, 16 lanes of each.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number, bit, byte = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        vectors = ir.VectorType(number, _LANES)
        size = 4 * _LANES

        def at(address: Any, offset: int) -> Any:
            moved = builder.add(address, address.type(offset))
            return builder.bitcast(builder.inttoptr(moved, byte), vectors.as_pointer())

        def all_lanes(value: Any) -> Any:
            first = builder.insert_element(vectors(ir.Undefined), value, number(0))
            return builder.shuffle_vector(first, vectors(ir.Undefined), vectors([0] * _LANES))

        start, bound, negative, ends = args
        bound, negative = all_lanes(bound), all_lanes(negative)
        low, high = builder.load(at(ends, 0), align=4), builder.load(at(ends, size), align=4)
        found = bit(0)
        for i in range(_WORD // _LANES):
            pattern = builder.load(at(start, i * size), align=4)
            above = builder.icmp_signed(">", pattern, bound)
            large = builder.or_(above, builder.icmp_unsigned(">", pattern, negative))
            flipped = builder.and_(builder.ashr(pattern, vectors([31] * _LANES)), vectors([int(_TOP)] * _LANES))
            key = builder.xor(pattern, flipped)
            lower = builder.select(builder.icmp_signed("<", key, low), key, low)
            higher = builder.select(builder.icmp_signed(">", key, high), key, high)
            low, high = builder.select(large, low, lower), builder.select(large, high, higher)
            lanes = builder.zext(builder.bitcast(large, ir.IntType(_LANES)), bit)
            found = builder.or_(found, builder.shl(lanes, bit(i * _LANES)))
        builder.store(low, at(ends, 0), align=4)
        builder.store(high, at(ends, size), align=4)
        return found

    return types.uint64(types.intp, types.int32, types.int32, types.intp), generate


@intrinsic
def _lowest(typingctx: Any, word: Any) -> Any:
    """Return the number of the lowest bit that is set in a uint64; 64 if there is none."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@intrinsic
def _ones(typingctx: Any, word: Any) -> Any:
    """Return how many bits are set in a uint64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@cache
def _sampler() -> Kernel:
    def sample(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        x, kind, stride, relu, size = words[3], words[4], words[5], words[6], words[8]
        keys = vector(words[7], np.int32(0), size)
        if kind == 0:
            patterns = vector(x, np.int32(0), (size - 1) * stride + 1)
            for i in range(size):
                keys[i] = patterns[i * stride]
        else:
            values = keys.view(np.float32)
            for i in range(size):
                read(x, kind, i * stride, 1, values[i : i + 1])
        dropped = np.int32(~_TOP) if relu else np.int32(0)
        for i in range(size):
            magnitude = np.int32(keys[i] & _TOP)
            keys[i] = np.int32(0) if keys[i] & dropped and magnitude <= _INFINITY else min(magnitude, _NAN)

    return build(sample)


@cache
def _surveyor() -> Kernel:
    def survey(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n = words[1], words[2], words[3], words[4], words[5]
        bound, negative = np.int32(words[6]), np.int32(words[7])
        found = vector(words[8], np.int32(0), blocks)
        starts = vector(words[9], np.int64(0), parts + 1)
        used = vector(words[10], np.int64(0), parts)
        places = vector(words[11], np.uint16(0), starts[parts])
        picked = vector(words[12], np.float32(0), starts[parts])
        ends = vector(words[13], np.int32(0), parts * 2 * _LANES)
        buffer = np.empty(_SPAN, np.float32)
        here = np.empty(_SPAN + 6, np.uint16)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, end = starts[part], starts[part + 1]
            lanes = part * 2 * _LANES
            ends[lanes : lanes + _LANES] = _TOP
            ends[lanes + _LANES : lanes + 2 * _LANES] = ~_TOP
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * _SPAN
                count = min(_SPAN, n - start)
                source = x + start * 4
                if kind or count < _SPAN:
                    read(x, kind, start, count, buffer)
                    buffer[count:] = buffer[0]  # not counted, and no new end of the range
                    source = np.int64(buffer.ctypes.data)
                many = 0
                for w in range(_SPAN // _WORD):
                    word = _above(source + w * _WORD * 4, bound, negative, words[13] + lanes * 4)  # pyright: ignore[reportCallIssue]
                    if count < (w + 1) * _WORD:
                        word &= (np.uint64(1) << np.uint64(max(count - w * _WORD, 0))) - np.uint64(1)
                    m = _ones(word)  # pyright: ignore[reportCallIssue]
                    for i in range(6):  # without asking how many there are, as branches that rarely err
                        here[many + i] = np.uint64(w * _WORD) + _lowest(word)  # pyright: ignore[reportCallIssue]
                        word &= word - np.uint64(1)
                    for i in range(6, m):
                        here[many + i] = np.uint64(w * _WORD) + _lowest(word)  # pyright: ignore[reportCallIssue]
                        word &= word - np.uint64(1)
                    many += m
                found[block] = many
                if at + many <= end:
                    values = vector(source, np.float32(0), _SPAN)
                    for i in range(many):
                        places[at + i] = here[i]
                        picked[at + i] = values[here[i]]
                at += many
            used[part] = at - starts[part]

    return build(survey)


@cache
def _settler() -> Kernel:
    def settle(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, length, kind, k = words[1], words[2], words[8], words[11], words[12]
        threshold = np.int32(words[13])
        found = vector(words[3], np.int32(0), blocks)
        table = vector(words[6], np.int64(0), 3 * parts)
        counts = vector(words[7], np.uint8(0), length)
        offsets = vector(words[9], np.uint8(0), k)
        ends = vector(words[14], np.int32(0), 2 * parts)
        small = np.empty(_SPAN, np.uint8)
        kept = np.empty(_SPAN, np.float32)
        many = np.empty(4, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, to, quota = table[part], table[parts + part], table[2 * parts + part]
            low, high = _TOP, np.int32(~_TOP)
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = np.int64(found[block])
                places = vector(words[4] + at * 2, np.uint16(0), count)
                picked = vector(words[5] + at * 4, np.int32(0), count)
                values = vector(words[5] + at * 4, np.float32(0), count)
                many[:] = 0
                m = 0
                for i in range(count):  # every one is written, those left to the rest are written over
                    pattern = picked[i]
                    magnitude = min(np.int32(pattern & _TOP), _NAN)
                    equal = 1 if magnitude == threshold else 0
                    keep = (1 if magnitude > threshold else 0) | (equal & (1 if quota > 0 else 0))
                    quota -= equal
                    inside = np.uint32(places[i]) // np.uint32(_POSITION_BLOCK)
                    many[inside] += np.uint8(keep)
                    small[m] = np.uint8(np.uint32(places[i]) - inside * np.uint32(_POSITION_BLOCK))
                    kept[m] = values[i]
                    m += keep
                    key = np.int32(pattern ^ (np.int32(pattern >> np.int32(31)) & _TOP))
                    key = _TOP if magnitude == _NAN else key
                    low = min(low, _TOP if keep else key)
                    high = max(high, np.int32(~_TOP) if keep else key)
                for i in range(min(4, length - 4 * block)):
                    counts[4 * block + i] = many[i]
                for i in range(m):
                    offsets[to + i] = small[i]
                _keep(words[10], kind, to, m, kept)
                at += count
                to += m
            ends[part], ends[parts + part] = low, high

    return build(settle)


@njit(inline="always")
def _keep(target: Any, kind: Any, start: Any, count: Any, values: Any) -> None:
    """Write values as they are kept: what is finite stays so, and what is positive positive (`kept_values`)."""
    if kind:
        largest = np.float32(_HALF_LARGEST if kind == 1 else _BRAIN_LARGEST)
        lost = np.float32(_HALF_LOST if kind == 1 else _BRAIN_LOST)
        smallest = np.float32(_HALF_SMALLEST if kind == 1 else _BRAIN_SMALLEST)
        for j in range(count):
            value = values[j]
            if abs(value) < np.float32(np.inf):
                value = min(max(value, -largest), largest)
                values[j] = smallest if np.float32(0) < value <= lost else value
    write(target, kind, start, count, values)


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n = words[1], words[2], words[3], words[4], words[5]
        least, inverse, relu, bits, packed = as_float(words[6]), as_float(words[7]), words[8], words[9], words[10]
        top = np.float32((1 << bits) - 1)
        bottom = np.float32(1 if relu else 0)
        shift = np.float32(1.5 if relu else 0.5)
        buffer = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                values = vector(x + block * BLOCK * 4, np.float32(0), count)
                if kind:
                    read(x, kind, block * BLOCK, count, buffer)
                    values = buffer
                if relu:
                    for j in range(count):
                        y = np.float32(np.float32(values[j] - least) * inverse) + shift
                        y = y if y > bottom else bottom
                        y = y if y < top else top
                        small[j] = np.uint8(np.int32(y if values[j] > np.float32(0) else np.float32(0)))
                else:
                    for j in range(count):
                        y = np.float32(np.float32(values[j] - least) * inverse) + shift
                        y = y if y > bottom else bottom
                        small[j] = np.uint8(np.int32(y if y < top else top))
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
        buffer = np.empty(2 * _POSITION_BLOCK, np.float32)
        small = np.empty(2 * _POSITION_BLOCK, np.uint8)
        staged = np.zeros(2 * _POSITION_BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * 2 * _POSITION_BLOCK
                count = min(2 * _POSITION_BLOCK, n - start)
                values = vector(out + start * 4, np.float32(0), count)
                if kind:
                    values = buffer
                else:
                    prefetch_to_write(out + (start + count) * 4, min(count, n - start - count) * 4)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                if relu:
                    for j in range(count):
                        code = np.float32(small[j])
                        y = least + (code - first) * step
                        y = most if y > most else y
                        y = fewest if y < fewest else y
                        values[j] = zero if code == np.float32(0) else y
                else:
                    for j in range(count):
                        y = least + (np.float32(small[j]) - first) * step
                        y = most if y > most else y
                        values[j] = fewest if y < fewest else y
                for half in range(2 * block, min(2 * block + 2, length)):
                    base = half * _POSITION_BLOCK - start
                    for i in range(ends[half] - np.int64(counts[half]), ends[half]):
                        values[base + np.int64(offsets[i])] = outliers[i]
                if kind:
                    write(out, kind, start, count, values)

    return build(dequantize)
