"""The groups of a block of rotated codes: where they lie, how they are turned, their sums and scales.

Parts of the kernels in rotated.py. A block is at most `BLOCK` numbers, a part of a row or whole rows, whose groups lie
in slots of whole chunks, which vectors.py takes in registers; behind fewer than 64 numbers of a group are zeros.
"""

from typing import Any

import numpy as np
from numba import njit  # pyright: ignore[reportPrivateImportUsage]

from ...tensors.rotation import LARGEST_GROUP, LEAST_PIECE, SHARED, SIGNS
from ..reference.rotated import INFINITY, LARGEST_HALF, NOT_A_NUMBER
from .numba_tools import GROUP, as_bits, as_float, load_word, random_words, store_word, vector
from .vector_code import LANES
from .vectors import (
    CHUNK,
    HALF,
    across,
    across_lanes,
    butterflies,
    flip_and_scale,
    greatest,
    scale_and_turn,
    turn_and_scale,
)

BLOCK = 1024  # numbers of a block at most, a multiple of all groups
GROUPS = BLOCK // CHUNK
STAGE = BLOCK + CHUNK + 8  # bytes: codes of a whole chunk and one word more are read and written behind the last
SUMS = BLOCK // HALF
PARTS = 2 * SUMS * LANES
WORDS = 4 * LARGEST_GROUP // SIGNS * GROUPS  # random, of the groups of a block
SHARED_SIGNS = 6 * LARGEST_GROUP  # of the passes of two turns
_MOST, _PIECE = LARGEST_GROUP, LEAST_PIECE
_SHARED, _SIGNS = np.uint64(SHARED), SIGNS
_INFINITY, _NOT_A_NUMBER, _LARGEST_HALF = np.int32(INFINITY), np.uint16(NOT_A_NUMBER), np.int32(LARGEST_HALF)


@njit(inline="always")
def turn(x: Any, g: Any, signs: Any, flips: Any) -> None:
    """Take sums and differences of `g` numbers at an address, 64 and more, flipped by `signs` first where `flips`."""
    for at in range(0, g, 2 * CHUNK):
        here, next_ = x + at * 4, x + (at + CHUNK) * 4
        if flips:
            butterflies(here, signs + at * 4, 0, CHUNK)  # pyright: ignore[reportCallIssue]
            if g > CHUNK:
                butterflies(next_, signs + (at + CHUNK) * 4, 1, CHUNK)  # pyright: ignore[reportCallIssue]
        else:
            butterflies(here, 0, 0, CHUNK)  # pyright: ignore[reportCallIssue]
            if g > CHUNK:
                butterflies(next_, 0, 1, CHUNK)  # pyright: ignore[reportCallIssue]
    if g == 4 * CHUNK:
        _across(x)


@njit(inline="always")
def _across(x: Any) -> None:
    """Take sums and differences of the halves of 256 numbers at an address."""
    across(x, x + 2 * CHUNK * 4)  # pyright: ignore[reportCallIssue]
    across(x + CHUNK * 4, x + 3 * CHUNK * 4)  # pyright: ignore[reportCallIssue]


@njit
def turn_short(x: Any, g: Any, turns: Any, signs: Any, back: Any) -> None:
    """Turn fewer than 64 numbers at an address, whose own signs are flipped, or turn them `back`."""
    p = _power_in(g)
    passes = turns if p == g else 3 * turns
    for i in range(passes):
        m = passes - 1 - i if back else i
        part, flips = x + (g - p if m % 3 == 1 and p < g else 0) * 4, vector(signs + m * _MOST * 4, np.int32(0), p)
        r = vector(part, np.int32(0), p)
        if not back:
            for j in range(p):
                r[j] ^= flips[j]
        _pass(part, p, p < g)
        if back:
            for j in range(p):
                r[j] ^= flips[j]


@njit
def _pass(x: Any, p: Any, shortens: Any) -> None:
    """Take sums and differences of `p` numbers at an address, at most 32; divide them by √p where `shortens`."""
    r = vector(x, np.float32(0), p)
    if p == 32:
        butterflies(x, 0, 0, 32)  # pyright: ignore[reportCallIssue]
    elif p == 16:
        butterflies(x, 0, 0, 16)  # pyright: ignore[reportCallIssue]
    elif p == 8:
        butterflies(x, 0, 0, 8)  # pyright: ignore[reportCallIssue]
    elif p == 4:
        a, b, c, d = r[0] + r[1], r[0] - r[1], r[2] + r[3], r[2] - r[3]
        r[0], r[1], r[2], r[3] = a + c, b + d, a - c, b - d
    elif p == 2:
        r[0], r[1] = r[0] + r[1], r[0] - r[1]
    if shortens:
        by = np.float32(1 / np.sqrt(np.float64(p)))
        for j in range(p):
            r[j] *= by


@njit
def share_signs(seed: Any, turns: Any, D: Any, G: Any, counters: Any, words: Any, signs: Any) -> None:
    """Write the signs of all passes, which all groups share; none of the first, whose signs are a group's own."""
    passes = turns if D % _PIECE == 0 else 3 * turns  # more than a turn each only where g ≠ p
    for i in range(_MOST):
        signs[i] = np.int32(0)
    for m in range(1, passes):
        random_words(seed, _SHARED + np.uint64(2 * m), counters, words)
        for i in range(min(counters * _SIGNS, _MOST)):
            bit = words[i // 32] >> np.uint32(i % 32) & np.uint32(1)
            signs[m * _MOST + i] = np.int32(~0x7FFFFFFF) if bit else np.int32(0)


@njit(inline="always")
def _size_at(left: Any, G: Any) -> Any:
    """Return the size of the next group, where `left` elements are left of the row."""
    size = G
    while size > max(left, _PIECE):
        size //= 2
    return min(size, left)


@njit(inline="always")
def _power_in(g: Any) -> Any:
    """Return the largest power of two not above `g`."""
    p = 1
    while 2 * p <= g:
        p *= 2
    return p


@njit(inline="always")
def groups_of_row(D: Any, G: Any) -> Any:
    """Return the number of groups of a row."""
    groups, left = D // G, D % G
    while left > 0:
        left -= _size_at(left, G)
        groups += 1
    return groups


@njit(inline="always")
def up_to(n: Any, multiple: Any) -> Any:
    """Return the next multiple from `n` on."""
    return (n + multiple - 1) // multiple * multiple


@njit
def lay_out(rows: Any, length: Any, left: Any, G: Any, sizes: Any, slots: Any, places: Any) -> Any:
    """Write size, slot and first code of each group of a block; return their number.

    Of each row the block has `length` elements, behind which the row has `left` − `length` more.
    """
    i = 0
    for row in range(rows):
        at = 0
        while at < length:
            sizes[i] = _size_at(left - at, G)
            slots[i], places[i] = row * up_to(length, CHUNK) + at, row * up_to(length, GROUP) + at
            at += sizes[i]
            i += 1
    return i


@njit(inline="always")
def add_lanes(lanes: Any, first: Any, sums: Any) -> None:
    """Write the sums of the halves of all chunks, whose lanes lie from vector `first` on."""
    for h in range(0, SUMS, LANES):
        from_ = lanes.ctypes.data + (first + h) * LANES * 4
        across_lanes(from_, sums.ctypes.data + h * 4, 1)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def find_greatest(x: Any, groups: Any, sizes: Any, slots: Any, lanes: Any, of_chunks: Any, most: Any) -> None:
    """Write the bits of the greatest magnitude of each group."""
    for i in range(groups):
        for at in range(slots[i], slots[i] + sizes[i], CHUNK):
            greatest(x + at * 4, lanes + at // CHUNK * LANES * 4)  # pyright: ignore[reportCallIssue]
    for c in range(0, GROUPS, LANES):
        across_lanes(lanes + c * LANES * 4, of_chunks.ctypes.data + c * 4, 0)  # pyright: ignore[reportCallIssue]
    for i in range(groups):
        most[i] = 0
        for at in range(slots[i], slots[i] + sizes[i], CHUNK):
            most[i] = max(most[i], of_chunks[at // CHUNK])


@njit(inline="always")
def tree_sum(sums: Any, slot: Any, g: Any) -> Any:
    """Return the sum of a group's halves of chunks, in the order of all backends."""
    h = slot // HALF
    total = sums[h] + sums[h + 1]
    if g > CHUNK:
        total += sums[h + 2] + sums[h + 3]
    if g > 2 * CHUNK:
        total += (sums[h + 4] + sums[h + 5]) + (sums[h + 6] + sums[h + 7])
    return total


@njit(inline="always")
def powers(most: Any) -> Any:
    """Return 2^-e and 2^e for the bits of a magnitude from 2^e on, such that both are normal numbers."""
    exponent = min(max(most >> np.int32(23), np.int32(2)), np.int32(253))
    return as_float((np.int32(254) - exponent) << np.int32(23)), as_float(exponent << np.int32(23))


@njit(inline="always")
def saved(scale: Any, most: Any) -> Any:
    """Return the 16 bits of a scale, to nearest, of a group of this greatest magnitude."""
    pattern = as_bits(scale)
    rounded = (pattern + np.int32(0x7FFF) + (pattern >> np.int32(16) & np.int32(1))) >> np.int32(16)
    finite = np.uint16(0) if most == 0 else np.uint16(min(rounded, _LARGEST_HALF))
    return _NOT_A_NUMBER if most >= _INFINITY else finite


@njit(inline="always")
def turn_first(x: Any, slot: Any, g: Any, down: Any, own: Any, work: Any, lanes: Any) -> None:
    """Scale and flip a group, and take the first turn unless it has fewer than 64 numbers; write lanes of squares."""
    for at in range(slot, slot + g, CHUNK):
        from_, to, squares, words = x + at * 4, work + at * 4, lanes + at, own + (at - slot) // 8
        if g < CHUNK:
            scale_and_turn(from_, down, words, to, squares, 2)  # pyright: ignore[reportCallIssue]
        elif (at - slot) % (2 * CHUNK) == 0:
            scale_and_turn(from_, down, words, to, squares, 0)  # pyright: ignore[reportCallIssue]
        else:
            scale_and_turn(from_, down, words, to, squares, 1)  # pyright: ignore[reportCallIssue]
    if g == 4 * CHUNK:
        _across(work + slot * 4)


@njit(inline="always")
def unit(g: Any, turns: Any) -> Any:
    """Return the square of the length that a group of length 1 has when it is turned, over its size."""
    return np.float32((g if turns == 2 else 1) if _power_in(g) == g else 1 / np.float64(g))


@njit(inline="always")
def norm(g: Any, turns: Any) -> Any:
    """Return what the passes over a whole group leave out."""
    return np.float32(1 / np.float64(g * g if turns == 2 else g) if _power_in(g) == g else 1)


@njit
def clear(codes: Any, g: Any, bits: Any, scale: Any) -> None:
    """Clear the bits behind the packed codes of `g` numbers at an address; of groups without a scale the codes too."""
    words = up_to(g, GROUP) // GROUP
    if scale == 0 or scale == _NOT_A_NUMBER:
        small = vector(codes, np.uint8(0), words * bits)
        for j in range(words * bits):
            small[j] = 0
    elif g % GROUP:
        last, used = codes + (words - 1) * bits, g % GROUP * bits
        rest = (np.uint64(1) << np.uint64(GROUP * bits - used)) - np.uint64(1)
        kept = load_word(last) & ~(rest << np.uint64(used))  # pyright: ignore[reportCallIssue]
        store_word(last, kept)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def turn_last(x: Any, g: Any, signs: Any, own: Any, factor: Any, limit: Any, to: Any) -> None:
    """Take the last turn back of `g` numbers at an address, unless they are fewer than 64; flip and scale them."""
    if g == CHUNK:
        turn_and_scale(x, signs, own, factor, limit, to, 0)  # pyright: ignore[reportCallIssue]
    elif g == 2 * CHUNK:
        butterflies(x, signs, 0, CHUNK)  # pyright: ignore[reportCallIssue]
        turn_and_scale(x + CHUNK * 4, signs + CHUNK * 4, own, factor, limit, to, 1)  # pyright: ignore[reportCallIssue]
    else:
        if g > CHUNK:
            turn(x, g, signs, True)
        for at in range(0, g, CHUNK):
            flip_and_scale(x + at * 4, own + at // 8, factor, limit, to + at * 4)  # pyright: ignore[reportCallIssue]
    if factor == np.float32(0):
        values = vector(to, np.float32(0), g)
        for j in range(g):
            values[j] = np.float32(0)
