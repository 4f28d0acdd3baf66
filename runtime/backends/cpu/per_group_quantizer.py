"""The kernel that makes codes of groups, and what its reader shares with it."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

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
)
from ...tensors.philox import GOLDEN_RATIO, NEAREST
from .numba_tools import (
    GROUP,
    as_bits,
    as_float,
    build,
    prefetch_to_read,
    random_words,
    read,
    scratch,
    take,
    vector,
    write_codes,
)
from .threads import JOB_WORDS, Kernel

# Elements processed at once. Fewer cost more overhead per block, more exceed the cache.
BLOCK = 1024
USUAL, HALF, QUARTER = 256, 128, 64  # G
_WORDS = BLOCK // 2  # of 32 random bits
_TURNS = 4 * (BLOCK // GROUP + 1)  # the words of a counter for every eight groups, of one element and more
STAGE = BLOCK + GROUP
# In the bits of float32: all but the sign; the largest number.
_TOP, _FINITE = np.int32(0x7FFFFFFF), np.int32(0x7F7FFFFF)
_LEAST_RANGE = np.float32(LEAST_RANGE)
_NOTHING, _BELOW, _ABOVE = np.float32(NOTHING), np.float32(BELOW), np.float32(ABOVE)
_NORMAL_LOWERED, _SKEWED_LOWERED = np.int32(LOWERED[1]), np.int32(LOWERED[2])


@cache
def quantizer() -> Kernel:
    """Return the kernel that makes codes, minima and ranges of groups; its job's words are taken in order below."""

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
        staged = scratch(STAGE, np.uint8(0))
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
def line_of(r: Any, lines: Any, width: Any, given: Any) -> Any:
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
        knots, line, r = line_of(r, lines, width, given)  # pyright: ignore[reportCallIssue]
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
                    y = np.float32(c0 * d) + bent(d, c1, K1) + bent(d, c2, K2) + np.float32(0.5)  # pyright: ignore[reportCallIssue]
                    code = np.int32(np.int32(np.int32(y) + np.int32(chances[j])) >> np.int32(16))
                    codes[j] = np.uint8(min(code, top))
                continue
            if knots == 4:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                c3, K3, c4, K4 = line[5], line[6], line[7], line[8]
                for j in range(count):
                    d = np.float32(np.float32(here[j] - Z) * scale)
                    y = np.float32(c0 * d) + bent(d, c1, K1) + bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    y = y + bent(d, c3, K3) + bent(d, c4, K4) + np.float32(0.5)  # pyright: ignore[reportCallIssue]
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
                        position[j] += bent(distance[j], c1, K1)  # pyright: ignore[reportCallIssue]
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


@njit(inline="always")
def bent(d: Any, c: Any, K: Any) -> Any:
    """Return what a knot at `K` adds to a curve."""
    return np.float32(c * max(np.float32(d - K), np.float32(0)))
