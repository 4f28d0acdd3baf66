"""Outlier quantization on the CPU: the four kernels that make codes, in the order in which outlier.py runs them."""

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from ...tensors.traits import largest, smallest
from ..reference.outlier import LEAST_SPAN, POSITION_BLOCK
from . import outlier_state
from .numba_tools import GROUP, as_float, build, read, take, vector, write, write_codes
from .outlier_state import CROWDED, DONE, LANES, MISLED, SPAN, state_of
from .threads import Kernel

_WORD = 64  # elements whose marks one word holds
_DIGITS = 2048  # of 11 bits: three passes sort the 31 bits of a magnitude
# In the bits of float32: all but the sign; infinity; a NaN, any of them, as conversions from float16 may change its
# payload.
_TOP, _INFINITY, _NAN = np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(0x7F800001)
_LEAST_SPAN = np.float32(LEAST_SPAN)
_HALF_LARGEST, _BRAIN_LARGEST = (np.float32(largest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_SMALLEST, _BRAIN_SMALLEST = (np.float32(smallest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_LOST, _BRAIN_LOST = np.float32(2.0**-25), np.float32(2.0**-134)  # largest numbers that are rounded to 0


@intrinsic
def _above(typingctx: Any, address: Any, bound: Any, negative: Any, ends: Any) -> Any:
    """Return a mask of 64 bits: which of the float32 numbers at an address have a magnitude above a bound.

    These are the patterns above `bound` as signed integers, or above `negative` as unsigned. The least and greatest
    keys of the others, and the least magnitude of all, are stored at the address `ends`, 16 lanes of each.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number, bit, byte = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        vectors = ir.VectorType(number, LANES)
        size = 4 * LANES

        def at(address: Any, offset: int) -> Any:
            moved = builder.add(address, address.type(offset))
            return builder.bitcast(builder.inttoptr(moved, byte), vectors.as_pointer())

        def all_lanes(value: Any) -> Any:
            first = builder.insert_element(vectors(ir.Undefined), value, number(0))
            return builder.shuffle_vector(first, vectors(ir.Undefined), vectors([0] * LANES))

        start, bound, negative, ends = args
        bound, negative = all_lanes(bound), all_lanes(negative)
        low, high = builder.load(at(ends, 0), align=4), builder.load(at(ends, size), align=4)
        least = builder.load(at(ends, 2 * size), align=4)
        found = bit(0)
        for i in range(_WORD // LANES):
            pattern = builder.load(at(start, i * size), align=4)
            above = builder.icmp_signed(">", pattern, bound)
            large = builder.or_(above, builder.icmp_unsigned(">", pattern, negative))
            flipped = builder.and_(builder.ashr(pattern, vectors([31] * LANES)), vectors([int(_TOP)] * LANES))
            key = builder.xor(pattern, flipped)
            lower = builder.select(builder.icmp_signed("<", key, low), key, low)
            higher = builder.select(builder.icmp_signed(">", key, high), key, high)
            low, high = builder.select(large, low, lower), builder.select(large, high, higher)
            magnitude = builder.and_(pattern, vectors([int(_TOP)] * LANES))
            least = builder.select(builder.icmp_signed("<", magnitude, least), magnitude, least)
            lanes = builder.zext(builder.bitcast(large, ir.IntType(LANES)), bit)
            found = builder.or_(found, builder.shl(lanes, bit(i * LANES)))
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
def bracketer() -> Kernel:
    """Return the kernel that finds the bound, in a sample."""

    def bracket(job):  # noqa: ANN001, ANN202
        state = state_of(job)  # pyright: ignore[reportCallIssue]
        x, kind, n, stride, rank = state.x, state.kind, state.n, state.stride, state.rank
        size = (n + stride - 1) // stride
        keys = vector(state.keys, np.int32(0), size)
        if kind == 0:
            patterns = vector(x, np.int32(0), n)
            for i in range(size):
                keys[i] = patterns[i * stride]
        else:
            values = keys.view(np.float32)
            for i in range(size):
                read(x, kind, i * stride, 1, values[i : i + 1])
        dropped = np.int32(~_TOP) if state.relu else np.int32(0)
        for i in range(size):
            magnitude = _magnitude(keys[i])
            keys[i] = np.int32(0) if keys[i] & dropped and magnitude < _NAN else magnitude
        bound = _TOP
        if rank:
            bound, _ = _ranked(keys, size, rank, np.empty(_DIGITS, np.int64))
            # Not below 0, even if fewer than k are above: the sample does not decide which zeros are outliers.
            bound = max(np.int32(bound - np.int32(state.below)), np.int32(0))
        state.bound = bound
        parts = state.parts
        starts = vector(state.starts, np.int64(0), parts + 1)
        for part in range(parts + 1):
            starts[part] = part * state.room

    return build(bracket, outlier_state)


@cache
def surveyor() -> Kernel:
    """Return the kernel that records the candidates, and the range of the others."""

    def survey(job):  # noqa: ANN001, ANN202
        state = state_of(job)  # pyright: ignore[reportCallIssue]
        parts, blocks, x, kind, n = state.parts, state.blocks, state.x, state.kind, state.n
        bound = np.int32(state.bound) if state.bound < _NAN else _TOP
        # Negative numbers are above the bound if their bits, as unsigned integers, are above this; with relu only NaN.
        negative = np.int32(~_TOP | (max(bound, _INFINITY) if state.relu else bound))
        found = vector(state.found, np.int32(0), blocks)
        starts = vector(state.starts, np.int64(0), parts + 1)
        used = vector(state.used, np.int64(0), parts)
        places = vector(state.places, np.uint16(0), starts[parts])
        picked = vector(state.picked, np.float32(0), starts[parts])
        ends = vector(state.ends, np.int32(0), parts * 3 * LANES)
        buffer = np.empty(SPAN, np.float32)
        here = np.empty(SPAN + 6, np.uint16)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, end = starts[part], starts[part + 1]
            lanes = part * 3 * LANES
            ends[lanes : lanes + LANES] = _TOP
            ends[lanes + LANES : lanes + 2 * LANES] = ~_TOP
            ends[lanes + 2 * LANES : lanes + 3 * LANES] = _TOP
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * SPAN
                count = min(SPAN, n - start)
                source = x + start * 4
                if kind or count < SPAN:
                    read(x, kind, start, count, buffer)
                    buffer[count:] = buffer[0]  # padding: not counted, and does not extend the range
                    source = np.int64(buffer.ctypes.data)
                many = 0
                for w in range(SPAN // _WORD):
                    word = _above(source + w * _WORD * 4, bound, negative, state.ends + lanes * 4)  # pyright: ignore[reportCallIssue]
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
                    values = vector(source, np.float32(0), SPAN)
                    for i in range(many):
                        places[at + i] = here[i]
                        picked[at + i] = values[here[i]]
                at += many
            used[part] = at - starts[part]

    return build(survey, outlier_state)


@cache
def chooser() -> Kernel:
    """Return the kernel that selects the threshold among the candidates, and computes the levels."""

    def choose(job):  # noqa: ANN001, ANN202
        state = state_of(job)  # pyright: ignore[reportCallIssue]
        parts, n, k, relu = state.parts, state.n, state.k, state.relu
        starts = vector(state.starts, np.int64(0), parts + 1)
        used = vector(state.used, np.int64(0), parts)
        firsts = vector(state.firsts, np.int64(0), parts)
        quotas = vector(state.quotas, np.int64(0), parts)
        patterns = vector(state.picked, np.int32(0), starts[parts])
        total = 0
        crowded = False
        for part in range(parts):
            total += used[part]
            crowded = crowded or used[part] > starts[part + 1] - starts[part]
        state.result = MISLED if total == n or total < k else CROWDED if crowded else DONE
        if state.result != DONE:
            return
        threshold, quota = np.int32(state.bound), 0
        if 0 <= k < total:
            keys = vector(state.keys, np.int32(0), total)
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
        state.threshold, state.kept = threshold, kept
        ends = vector(state.ends, np.int32(0), parts * 3 * LANES)
        has_zeros = False  # all zeros are among the others: a bound is never below 0
        for part in range(parts):
            for lane in range(3 * part * LANES, (3 * part + 1) * LANES):
                low, high = min(low, ends[lane]), max(high, ends[lane + LANES])
                has_zeros = has_zeros or ends[lane + 2 * LANES] == 0
        if low > high:  # the rest is empty
            low = high = np.int32(0)
        elif low < ~_INFINITY:  # a negative NaN, the least key, makes both ends NaN
            high = _NAN
        levels = vector(state.levels, np.float32(0), 2)
        least = np.float32(0) if relu else np.float32(as_float(_key(low)) + np.float32(0))  # no −0
        most, steps = as_float(_key(high)), np.float32(state.steps)
        span = np.float32(most - least)
        step = np.float32(max(span, _LEAST_SPAN) / steps)
        if has_zeros and least < np.float32(0) and most >= np.float32(0):
            least, step = _levels_with_zero(least, most, span, steps)  # pyright: ignore[reportCallIssue]
        finite = abs(span) < np.float32(np.inf)
        levels[0] = least if finite else np.float32(np.nan)
        levels[1] = step if finite else np.float32(np.nan)

    return build(choose, outlier_state)


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
def keeper() -> Kernel:
    """Return the kernel that writes codes and outliers."""

    def keep(job):  # noqa: ANN001, ANN202
        state = state_of(job)  # pyright: ignore[reportCallIssue]
        parts, blocks, x, kind, n = state.parts, state.blocks, state.x, state.kind, state.n
        relu, bits = state.relu != 0, state.bits
        levels = vector(state.levels, np.float32(0), 2)
        least, inverse = levels[0], np.float32(1) / levels[1]
        top = np.float32((1 << bits) - 1)
        bottom = np.float32(1 if relu else 0)
        shift = np.float32(1.5 if relu else 0.5)
        threshold = np.int32(state.threshold)
        found = vector(state.found, np.int32(0), blocks)
        starts = vector(state.starts, np.int64(0), parts + 1)
        firsts = vector(state.firsts, np.int64(0), parts)
        quotas = vector(state.quotas, np.int64(0), parts)
        length = (n + POSITION_BLOCK - 1) // POSITION_BLOCK
        counts = vector(state.counts, np.uint8(0), length)
        offsets = vector(state.offsets, np.uint8(0), state.kept)
        buffer = np.empty(SPAN, np.float32)
        small = np.empty(SPAN, np.uint8)
        staged = np.empty(SPAN + GROUP, np.uint8)
        kept = np.empty(SPAN, np.float32)
        many = np.empty(4, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            at, to, quota = starts[part], firsts[part], quotas[part]
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                count = np.int64(found[block])
                places = vector(state.places + at * 2, np.uint16(0), count)
                patterns = vector(state.picked + at * 4, np.int32(0), count)
                picked = vector(state.picked + at * 4, np.float32(0), count)
                many[:] = 0
                m = 0
                for i in range(count):  # unconditional writes; those of the rest are overwritten
                    magnitude = _magnitude(patterns[i])
                    equal = 1 if magnitude == threshold else 0
                    outlier = (1 if magnitude > threshold else 0) | (equal & (1 if quota > 0 else 0))
                    quota -= equal
                    inside = np.uint32(places[i]) // np.uint32(POSITION_BLOCK)
                    many[inside] += np.uint8(outlier)
                    small[m] = np.uint8(np.uint32(places[i]) - inside * np.uint32(POSITION_BLOCK))
                    kept[m] = picked[i]
                    m += outlier
                for i in range(min(4, length - 4 * block)):
                    counts[4 * block + i] = many[i]
                for i in range(m):
                    offsets[to + i] = small[i]
                _keep_values(state.values, state.value_kind, to, m, kept)
                at += count
                to += m

                start = block * SPAN
                count = min(SPAN, n - start)
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
                write_codes(small, count, bits, staged, state.packed, start // GROUP)

    return build(keep, outlier_state)


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
