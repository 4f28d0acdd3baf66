"""Outlier quantization on the CPU: the threshold is bracketed by a sample, instead of selecting among all elements.

    bracket   a sample gives a bound that is almost surely a little below the threshold
    survey    one pass over x, 64 elements to a word of bits, records the elements above the bound, the candidates,
              and the range of the others; all threads
    choose    selects the exact threshold among the few candidates; those below it belong to the rest, whose levels
              are now known
    keep      a second pass over x: codes, and the candidates that are outliers; all threads

If the sample was misleading, the reference compresses instead. The four kernels share one array of numbers and
addresses, a `_State`: between the layers of a network, when caches hold other data, a call of NumPy or torch takes as
long as computing with 10,000 elements.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic
from torch import Tensor

from ...tensors import host_memory
from ...tensors.dtypes import KINDS, largest, smallest
from ...tensors.packing import packed_size
from ..reference import outlier as reference
from ..reference.outlier import LEAST_SPAN, POSITION_BLOCK, count_of, steps_of
from .numba_tools import (
    GROUP,
    as_float,
    build,
    prefetch_to_read,
    prefetch_to_write,
    read,
    read_codes,
    take,
    vector,
    write,
    write_codes,
)
from .threads import JOB_WORDS, Kernel, parts_of, run

_SAMPLE = 1 << 13
_TOP = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NAN = np.int32(0x7F800001)  # any NaN: conversions from float16 may change its payload
_POSITION_BLOCK = POSITION_BLOCK
_LANES = 16  # lanes of a vector in `survey`
_WORD = 64
_SPAN = 4 * _POSITION_BLOCK  # elements processed at once: whole words of 64, and whole blocks of positions
_DIGITS = 2048
_LEAST_SPAN = np.float32(LEAST_SPAN)
_HALF_LARGEST, _BRAIN_LARGEST = (np.float32(largest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_SMALLEST, _BRAIN_SMALLEST = (np.float32(smallest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_LOST, _BRAIN_LOST = np.float32(2.0**-25), np.float32(2.0**-134)  # largest numbers that are rounded to 0
_SINGLE_LARGEST, _SINGLE_SMALLEST = np.float32(largest(torch.float32)), np.float32(smallest(torch.float32))

# Indices into the state, int64. Inputs:
_X, _KIND, _N, _RELU, _BITS, _STEPS = range(6)  # address, format (dtypes.KINDS), elements; bits, steps
_STRIDE, _RANK, _BELOW = range(6, 9)  # sampling stride; rank of the sample that gives the bound, and offset below it
_K, _PARTS, _BLOCKS = range(9, 12)  # number of outliers, or −1: all candidates; parts and spans of the job
_ROOM = 31  # room for candidates, in each part
# Addresses of scratch memory:
_KEYS = 12  # int32: keys of the sample, then of all candidates
_FOUND = 13  # int32 (blocks,): candidates in each span
_ENDS = 14  # int32 (parts, 3, lanes): least and greatest keys of the others, and their least magnitude
_STARTS, _USED = 15, 16  # int64 (parts + 1,), (parts,): first entry of each part's candidates, and their number
_FIRSTS, _QUOTAS = 17, 18  # int64 (parts,): outliers before each part, and its outliers that equal the threshold
_PLACES, _PICKED = 19, 20  # uint16 and float32: offset in its span and value of each candidate
# Outputs:
_BOUND, _THRESHOLD, _KEPT = 21, 22, 23
_RESULT = 24  # of `choose`: _DONE, _MISLED or _CROWDED
# Addresses of the results, as in `OutlierCompressed`:
_LEVELS, _PACKED, _COUNTS, _OFFSETS, _VALUES, _VALUE_KIND = range(25, 31)
_STATE = 32
_DONE, _MISLED, _CROWDED = 0, 1, 2


def quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return packed, counts, offsets, values and levels of `x` (n,), equal to the reference's."""
    parts = _quantize(x, bits, ratio, relu, value_dtype, sample_every) if x.numel() else None
    return parts or reference.quantize(x, bits, ratio, relu, value_dtype, sample_every)


def _quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Return the results of `quantize`, or None if the sample was misleading."""
    n = x.numel()
    stride, rank, below, k, expected = _bracket(n, ratio, sample_every)
    blocks = -(-n // _SPAN)
    parts = parts_of(blocks)
    # Twice the average for each part, because parts differ.
    room = min(n, expected if parts == 1 else 2 * expected // parts) + _SPAN
    levels = torch.empty(2, dtype=torch.float32, device="cpu")
    state = np.zeros(_STATE, np.int64)
    state[: _BLOCKS + 1] = (
        *(x.data_ptr(), KINDS[x.dtype], n, int(relu), bits, steps_of(bits, relu)),
        *(stride, rank, below, k, parts, blocks),
    )
    state[_LEVELS], state[_ROOM] = levels.data_ptr(), room
    memory = _workspace(state, -(-n // stride), parts * room)
    address = state.ctypes.data
    run(_bracketer(), 1, address)
    for _ in range(2):
        run(_surveyor(), blocks, address)
        run(_chooser(), 1, address)
        if state[_RESULT] != _CROWDED:
            break
        used = np.concatenate([[0], _view(memory, state[_USED], parts).cumsum()])
        memory = _workspace(state, int(used[-1]), int(used[-1]))
        _view(memory, state[_STARTS], parts + 1)[:] = used
    if state[_RESULT] != _DONE:
        return None
    kept = int(state[_KEPT])
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    counts = torch.empty(-(-n // _POSITION_BLOCK), dtype=torch.uint8, device="cpu")
    offsets = torch.empty(kept, dtype=torch.uint8, device="cpu")
    values = torch.empty(kept, dtype=value_dtype or x.dtype, device="cpu")
    results = (packed.data_ptr(), counts.data_ptr(), offsets.data_ptr(), values.data_ptr(), KINDS[values.dtype])
    state[_PACKED : _VALUE_KIND + 1] = results
    run(_keeper(), blocks, address)
    return packed, counts, offsets, values, levels


def _bracket(n: int, ratio: float, sample_every: int) -> tuple[int, int, int, int, int]:
    """Return the parameters of the bound, and the expected number of candidates.

    Returns:
        stride: sampling stride.
        rank: the rank-th largest sample is the bound; with 0 nothing is above it.
        below: offset below it, 1 to include its equals among the candidates.
        k: number of outliers; −1 if all candidates are.
        expected: usual upper limit of the number of candidates.
    """
    k = count_of(n, ratio)
    stride = sample_every
    if stride > 1:
        size = -(-n // stride)
        return stride, max(1, count_of(size, ratio)) if ratio else 0, 0, -1, 2 * k
    stride = max(1, n // _SAMPLE) | 1  # odd: an even stride may sample the same column of every image, at its edge
    size = -(-n // stride)
    if stride == 1 or k == 0:
        return stride, k, 1, k, k
    share = k / n * size
    rank = min(size, int(share + 4 * share**0.5 + 8))  # four standard deviations above its share
    return stride, rank, 1, k, int((rank + 4 * rank**0.5) / size * n)


def _workspace(state: np.ndarray, keys: int, candidates: int) -> np.ndarray:
    """Allocate memory for `keys` keys of a sample and `candidates`, and write the addresses into the state."""
    parts, blocks = int(state[_PARTS]), int(state[_BLOCKS])
    sizes = (4 * max(keys, candidates), 4 * blocks, 12 * _LANES * parts)
    sizes = (*sizes, 8 * (parts + 1), *(8 * parts,) * 3, 2 * candidates, 4 * candidates)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + (size + 63) // 64 * 64)
    memory = np.empty(offsets[-1], np.uint8)
    state[_KEYS : _PICKED + 1] = offsets[:-1]
    state[_KEYS : _PICKED + 1] += memory.ctypes.data
    return memory


def dequantize(
    packed: Tensor,
    counts: Tensor,
    offsets: Tensor,
    values: Tensor,
    levels: Tensor,
    bits: int,
    relu: bool,
    out: Tensor,
) -> None:
    """Write the dequantized codes, and the outliers, to `out` (n,)."""
    n = out.numel()
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device="cpu")
        dequantize(packed, counts, offsets, values, levels, bits, relu, single)
        out.copy_(single)
        return
    codes = (packed.data_ptr(), n, bits, levels.data_ptr(), int(relu))
    outliers = (counts.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel(), KINDS[values.dtype])
    run(_dequantizer(), -(-n // _SPAN), *codes, *outliers, out.data_ptr(), KINDS[out.dtype])


def masked(grad: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Return the dense tensor `grad` where the codes, in its memory order, are not 0, else 0."""
    out = host_memory.empty_like(grad)
    n = grad.numel()
    run(_masker(), -(-n // _SPAN), packed.data_ptr(), n, bits, grad.data_ptr(), out.data_ptr(), grad.element_size())
    return out


def _view(memory: np.ndarray, address: int, n: int) -> np.ndarray:
    """Return the `n` int64 numbers at an address in `memory`."""
    start = int(address) - memory.ctypes.data
    return memory[start : start + 8 * n].view(np.int64)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@intrinsic
def _above(typingctx: Any, address: Any, bound: Any, negative: Any, ends: Any) -> Any:
    """Return a mask of 64 bits: which of the float32 numbers at an address have a magnitude above a bound.

    These are the patterns above `bound` as signed integers, or above `negative` as unsigned. The least and greatest
    keys of the others, and the least magnitude of all, are stored at the address `ends`, 16 lanes of each.
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
        least = builder.load(at(ends, 2 * size), align=4)
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
            magnitude = builder.and_(pattern, vectors([int(_TOP)] * _LANES))
            least = builder.select(builder.icmp_signed("<", magnitude, least), magnitude, least)
            lanes = builder.zext(builder.bitcast(large, ir.IntType(_LANES)), bit)
            found = builder.or_(found, builder.shl(lanes, bit(i * _LANES)))
        builder.store(low, at(ends, 0), align=4)
        builder.store(high, at(ends, size), align=4)
        builder.store(least, at(ends, 2 * size), align=4)
        return found

    return types.uint64(types.intp, types.int32, types.int32, types.intp), generate


@intrinsic
def _lowest(typingctx: Any, word: Any) -> Any:
    """Return the index of the lowest set bit of a uint64; 64 if there is none."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@intrinsic
def _ones(typingctx: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@njit(inline="always")
def _magnitude(pattern: Any) -> Any:
    """Return the magnitude (reference/outlier.py) of a float32 number from its bits; every NaN is above all numbers."""
    return min(np.int32(pattern & _TOP), _NAN)


@njit(inline="always")
def _key(pattern: Any) -> Any:
    """Return an integer in the order of the numbers from the bits of a float32, or the bits from that integer."""
    return np.int32(pattern ^ (np.int32(pattern >> np.int32(31)) & _TOP))


@njit(inline="always")
def _ranked(keys: Any, count: Any, rank: Any, histogram: Any) -> Any:
    """Return the rank-th largest of the first `count` keys (magnitudes), and how many of its equals are among `rank`.

    Radix selection by digits of 11, 10 and 10 bits; only the keys that share the digits so far remain.
    """
    found = 0
    for shift in range(20, -1, -10):
        for i in range(_DIGITS):
            histogram[i] = 0
        digits = _DIGITS - 1 if shift == 20 else _DIGITS // 2 - 1
        for i in range(count):
            histogram[(keys[i] >> shift) & digits] += 1
        digit = digits
        while histogram[digit] < rank:
            rank -= histogram[digit]
            digit -= 1
        found |= digit << shift
        left = 0
        for i in range(count):  # unconditional writes; most are overwritten
            key = keys[i]
            keys[left] = key
            left += 1 if (key >> shift) & digits == digit else 0
        count = left
    return np.int32(found), rank


@cache
def _bracketer() -> Kernel:
    def bracket(job):  # noqa: ANN001, ANN202
        state = vector(carray(job, (JOB_WORDS,))[3], np.int64(0), _STATE)
        x, kind, n, stride, rank = state[_X], state[_KIND], state[_N], state[_STRIDE], state[_RANK]
        size = (n + stride - 1) // stride
        keys = vector(state[_KEYS], np.int32(0), size)
        if kind == 0:
            patterns = vector(x, np.int32(0), n)
            for i in range(size):
                keys[i] = patterns[i * stride]
        else:
            values = keys.view(np.float32)
            for i in range(size):
                read(x, kind, i * stride, 1, values[i : i + 1])
        dropped = np.int32(~_TOP) if state[_RELU] else np.int32(0)
        for i in range(size):
            magnitude = _magnitude(keys[i])
            keys[i] = np.int32(0) if keys[i] & dropped and magnitude < _NAN else magnitude
        bound = _TOP
        if rank:
            bound, _ = _ranked(keys, size, rank, np.empty(_DIGITS, np.int64))
            # Not below 0, even if fewer than k are above: the sample does not decide which zeros are outliers.
            bound = max(np.int32(bound - np.int32(state[_BELOW])), np.int32(0))
        state[_BOUND] = bound
        parts = state[_PARTS]
        starts = vector(state[_STARTS], np.int64(0), parts + 1)
        for part in range(parts + 1):
            starts[part] = part * state[_ROOM]

    return build(bracket)


@cache
def _surveyor() -> Kernel:
    def survey(job):  # noqa: ANN001, ANN202
        state = vector(carray(job, (JOB_WORDS,))[3], np.int64(0), _STATE)
        parts, blocks, x, kind, n = state[_PARTS], state[_BLOCKS], state[_X], state[_KIND], state[_N]
        bound = np.int32(state[_BOUND]) if state[_BOUND] < _NAN else _TOP
        # Negative numbers are above the bound if their bits, as unsigned integers, are above this; with relu only NaN.
        negative = np.int32(~_TOP | (max(bound, _INFINITY) if state[_RELU] else bound))
        found = vector(state[_FOUND], np.int32(0), blocks)
        starts = vector(state[_STARTS], np.int64(0), parts + 1)
        used = vector(state[_USED], np.int64(0), parts)
        places = vector(state[_PLACES], np.uint16(0), starts[parts])
        picked = vector(state[_PICKED], np.float32(0), starts[parts])
        ends = vector(state[_ENDS], np.int32(0), parts * 3 * _LANES)
        buffer = np.empty(_SPAN, np.float32)
        here = np.empty(_SPAN + 6, np.uint16)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, end = starts[part], starts[part + 1]
            lanes = part * 3 * _LANES
            ends[lanes : lanes + _LANES] = _TOP
            ends[lanes + _LANES : lanes + 2 * _LANES] = ~_TOP
            ends[lanes + 2 * _LANES : lanes + 3 * _LANES] = _TOP
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * _SPAN
                count = min(_SPAN, n - start)
                source = x + start * 4
                if kind or count < _SPAN:
                    read(x, kind, start, count, buffer)
                    buffer[count:] = buffer[0]  # padding: not counted, and does not extend the range
                    source = np.int64(buffer.ctypes.data)
                many = 0
                for w in range(_SPAN // _WORD):
                    word = _above(source + w * _WORD * 4, bound, negative, state[_ENDS] + lanes * 4)  # pyright: ignore[reportCallIssue]
                    if count < (w + 1) * _WORD:
                        word &= (np.uint64(1) << np.uint64(max(count - w * _WORD, 0))) - np.uint64(1)
                    m = _ones(word)  # pyright: ignore[reportCallIssue]
                    for i in range(6):  # a fixed number without a test, so that branches are rarely mispredicted
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
def _chooser() -> Kernel:
    def choose(job):  # noqa: ANN001, ANN202
        state = vector(carray(job, (JOB_WORDS,))[3], np.int64(0), _STATE)
        parts, n, k, relu = state[_PARTS], state[_N], state[_K], state[_RELU]
        starts = vector(state[_STARTS], np.int64(0), parts + 1)
        used = vector(state[_USED], np.int64(0), parts)
        firsts = vector(state[_FIRSTS], np.int64(0), parts)
        quotas = vector(state[_QUOTAS], np.int64(0), parts)
        patterns = vector(state[_PICKED], np.int32(0), starts[parts])
        total = 0
        crowded = False
        for part in range(parts):
            total += used[part]
            crowded = crowded or used[part] > starts[part + 1] - starts[part]
        state[_RESULT] = _MISLED if total == n or total < k else _CROWDED if crowded else _DONE
        if state[_RESULT] != _DONE:
            return
        threshold, quota = np.int32(state[_BOUND]), 0
        if 0 <= k < total:
            keys = vector(state[_KEYS], np.int32(0), total)
            at = 0
            for part in range(parts):
                those = patterns[starts[part] : starts[part] + used[part]]
                for i in range(used[part]):
                    keys[at + i] = _magnitude(those[i])
                at += used[part]
            threshold, quota = _ranked(keys, total, k, np.empty(_DIGITS, np.int64))
        low, high = _TOP, np.int32(~_TOP)
        kept = 0
        for part in range(parts):
            those = patterns[starts[part] : starts[part] + used[part]]
            above, equal = np.int32(0), np.int32(0)
            for i in range(used[part]):
                magnitude = _magnitude(those[i])
                key = _TOP if magnitude == _NAN else _key(those[i])
                above = np.int32(above + (np.int32(1) if magnitude > threshold else np.int32(0)))
                equal = np.int32(equal + (np.int32(1) if magnitude == threshold else np.int32(0)))
                low = min(low, key if magnitude < threshold else _TOP)
                high = max(high, key if magnitude < threshold else np.int32(~_TOP))
            firsts[part] = kept
            quotas[part] = min(np.int64(equal), quota)
            kept += above + quotas[part]
            if equal > quotas[part]:
                skip = quotas[part]
                for i in range(used[part]):
                    if _magnitude(those[i]) == threshold:
                        if skip <= 0:
                            key = _TOP if threshold == _NAN else _key(those[i])
                            low, high = min(low, key), max(high, key)
                        skip -= 1
            quota -= quotas[part]
        state[_THRESHOLD], state[_KEPT] = threshold, kept
        ends = vector(state[_ENDS], np.int32(0), parts * 3 * _LANES)
        has_zeros = False  # all zeros are among the others: a bound is never below 0
        for part in range(parts):
            for lane in range(3 * part * _LANES, (3 * part + 1) * _LANES):
                low, high = min(low, ends[lane]), max(high, ends[lane + _LANES])
                has_zeros = has_zeros or ends[lane + 2 * _LANES] == 0
        if low > high:  # the rest is empty
            low = high = np.int32(0)
        elif low < ~_INFINITY:  # a negative NaN, the least key, makes both ends NaN
            high = _NAN
        levels = vector(state[_LEVELS], np.float32(0), 2)
        least = np.float32(0) if relu else np.float32(as_float(_key(low)) + np.float32(0))  # no −0
        most, steps = as_float(_key(high)), np.float32(state[_STEPS])
        span = np.float32(most - least)
        step = np.float32(max(span, _LEAST_SPAN) / steps)
        if has_zeros and least < np.float32(0) and most >= np.float32(0):
            least, step = _levels_with_zero(least, most, span, steps)  # pyright: ignore[reportCallIssue]
        finite = abs(span) < np.float32(np.inf)
        levels[0] = least if finite else np.float32(np.nan)
        levels[1] = step if finite else np.float32(np.nan)

    return build(choose)


@njit(inline="always")
def _levels_with_zero(low: Any, high: Any, span: Any, steps: Any) -> Any:
    """Return the lowest level and the step such that 0 is a level, as the reference's `levels_of` does."""
    zero, one = np.float32(0), np.float32(1)
    most = np.float32(steps - (one if high > zero else zero))
    if most == zero:
        below, step = (one if high < -low else zero), max(high, np.float32(-low))
    else:
        below = min(max(np.float32(np.floor(np.float32(np.float32(-low / span) * steps))), one), most)
        step = _distance(low, high, below, steps)  # pyright: ignore[reportCallIssue]
        second = min(np.float32(below + one), most)
        other = _distance(low, high, second, steps)  # pyright: ignore[reportCallIssue]
        if other < step:
            below, step = second, other
    step = max(step, np.float32(_LEAST_SPAN / steps))
    return np.float32(zero - np.float32(below * step)), step


@njit(inline="always")
def _distance(low: Any, high: Any, below: Any, steps: Any) -> Any:
    """Return the least step that reaches `low` and `high` with `below` levels below 0."""
    down = np.float32(-low / below)
    return max(down, np.float32(high / np.float32(steps - below))) if below < steps else down


@cache
def _keeper() -> Kernel:
    def keep(job):  # noqa: ANN001, ANN202
        state = vector(carray(job, (JOB_WORDS,))[3], np.int64(0), _STATE)
        parts, blocks, x, kind, n = state[_PARTS], state[_BLOCKS], state[_X], state[_KIND], state[_N]
        relu, bits = state[_RELU] != 0, state[_BITS]
        levels = vector(state[_LEVELS], np.float32(0), 2)
        least, inverse = levels[0], np.float32(1) / levels[1]
        top = np.float32((1 << bits) - 1)
        bottom = np.float32(1 if relu else 0)
        shift = np.float32(1.5 if relu else 0.5)
        threshold = np.int32(state[_THRESHOLD])
        found = vector(state[_FOUND], np.int32(0), blocks)
        starts = vector(state[_STARTS], np.int64(0), parts + 1)
        firsts = vector(state[_FIRSTS], np.int64(0), parts)
        quotas = vector(state[_QUOTAS], np.int64(0), parts)
        length = (n + _POSITION_BLOCK - 1) // _POSITION_BLOCK
        counts = vector(state[_COUNTS], np.uint8(0), length)
        offsets = vector(state[_OFFSETS], np.uint8(0), state[_KEPT])
        buffer = np.empty(_SPAN, np.float32)
        small = np.empty(_SPAN, np.uint8)
        staged = np.empty(_SPAN + GROUP, np.uint8)
        kept = np.empty(_SPAN, np.float32)
        many = np.empty(4, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, to, quota = starts[part], firsts[part], quotas[part]
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = np.int64(found[block])
                places = vector(state[_PLACES] + at * 2, np.uint16(0), count)
                patterns = vector(state[_PICKED] + at * 4, np.int32(0), count)
                picked = vector(state[_PICKED] + at * 4, np.float32(0), count)
                many[:] = 0
                m = 0
                for i in range(count):  # unconditional writes; those of the rest are overwritten
                    magnitude = _magnitude(patterns[i])
                    equal = 1 if magnitude == threshold else 0
                    outlier = (1 if magnitude > threshold else 0) | (equal & (1 if quota > 0 else 0))
                    quota -= equal
                    inside = np.uint32(places[i]) // np.uint32(_POSITION_BLOCK)
                    many[inside] += np.uint8(outlier)
                    small[m] = np.uint8(np.uint32(places[i]) - inside * np.uint32(_POSITION_BLOCK))
                    kept[m] = picked[i]
                    m += outlier
                for i in range(min(4, length - 4 * block)):
                    counts[4 * block + i] = many[i]
                for i in range(m):
                    offsets[to + i] = small[i]
                _keep_values(state[_VALUES], state[_VALUE_KIND], to, m, kept)
                at += count
                to += m

                start = block * _SPAN
                count = min(_SPAN, n - start)
                values = vector(x + start * 4, np.float32(0), count)
                if kind:
                    read(x, kind, start, count, buffer)
                    values = buffer
                if relu:
                    for j in range(count):
                        y = np.float32(np.float32(values[j] - least) * inverse) + shift
                        y = y if y > bottom else bottom
                        y = y if y < top else top
                        small[j] = np.uint8(np.int32(np.float32(0) if values[j] <= np.float32(0) else y))
                else:
                    for j in range(count):
                        y = np.float32(np.float32(values[j] - least) * inverse) + shift
                        y = y if y > bottom else bottom
                        small[j] = np.uint8(np.int32(y if y < top else top))
                write_codes(small, count, bits, staged, state[_PACKED], start // GROUP)

    return build(keep)


@njit(inline="always")
def _keep_values(target: Any, kind: Any, start: Any, count: Any, values: Any) -> None:
    """Write outliers in the saved dtype: finite values stay finite, positive ones positive (`kept_values`)."""
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
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, n, bits = words[1], words[2], words[3], words[4], words[5]
        line = vector(words[6], np.float32(0), 2)
        least, step = line[0], line[1]
        relu = words[7] != 0
        length = (n + _POSITION_BLOCK - 1) // _POSITION_BLOCK
        counts = vector(words[8], np.uint8(0), length)
        total = words[11]
        offsets = vector(words[9], np.uint8(0), total)
        outliers, value_kind, out, kind = words[10], words[12], words[13], words[14]
        most = _SINGLE_LARGEST if kind == 0 else _HALF_LARGEST if kind == 1 else _BRAIN_LARGEST
        fewest = (_HALF_SMALLEST if kind == 1 else _SINGLE_SMALLEST) if relu else -most
        zero = np.float32(0) * step
        first = np.float32(1 if relu else 0)
        buffer = np.empty(_SPAN, np.float32)
        large = np.empty(_POSITION_BLOCK, np.float32)
        small = np.empty(_SPAN, np.uint8)
        staged = np.zeros(_SPAN + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            begin = blocks * part // parts
            at = 0
            for i in range(4 * begin):
                at += np.int64(counts[i])
            at = min(at, total)
            for block in range(begin, blocks * (part + 1) // parts):
                start = block * _SPAN
                count = min(_SPAN, n - start)
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
                for i in range(4 * block, min(4 * block + 4, length)):
                    # In bounds whatever the parts hold: they may have changed since they were checked.
                    many = min(np.int64(counts[i]), min(np.int64(_POSITION_BLOCK), total - at))
                    read(outliers, value_kind, at, many, large)
                    base = i * _POSITION_BLOCK - start
                    last = min(np.int64(_POSITION_BLOCK), count - base) - 1
                    for j in range(many):
                        values[base + min(np.int64(offsets[at + j]), last)] = large[j]
                    at += many
                if kind:
                    write(out, kind, start, count, values)

    return build(dequantize)


@cache
def _masker() -> Kernel:
    def mask(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, n, bits = words[1], words[2], words[3], words[4], words[5]
        grad, out, size = words[6], words[7], words[8]
        small = np.empty(_SPAN, np.uint8)
        staged = np.zeros(_SPAN + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * _SPAN
                count = min(_SPAN, n - start)
                ahead = min(count, n - start - count) * size
                prefetch_to_read(grad + (start + count) * size, ahead)
                prefetch_to_write(out + (start + count) * size, ahead)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                if size == 2:
                    _mask(grad + start * 2, out + start * 2, np.uint16(0), small, count)
                elif size == 4:
                    _mask(grad + start * 4, out + start * 4, np.uint32(0), small, count)
                else:
                    _mask(grad + start * 8, out + start * 8, np.uint64(0), small, count)

    return build(mask)


@njit(inline="always")
def _mask(grad: Any, out: Any, zero: Any, small: Any, count: Any) -> None:
    """Write the numbers at the address `grad`, or `zero` where their codes are 0, to the address `out`."""
    source, target = vector(grad, zero, count), vector(out, zero, count)  # pyright: ignore[reportCallIssue]
    for j in range(count):
        target[j] = source[j] if small[j] else zero
