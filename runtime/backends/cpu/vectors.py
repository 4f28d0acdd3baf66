"""Vectors of eight numbers, written for LLVM: what loops over a group of rotated codes are made of.

LLVM makes vectors of most loops by itself, but not of those that exchange neighbours, and Numba's integers are of 64
bits. An operation takes 64 numbers from an address on: they fill half of a processor's sixteen registers of 256 bits.

Codes are packed as they are found and never lie a byte each: eight comparisons are the bits of a byte, and
`spread_bits` says where these lie in the packed word of eight codes.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_code import FLOATS, INTEGERS, LANES, WORD, Vectors, by_bits, intrinsic_of

CHUNK = 64  # numbers of an operation
HALF = CHUNK // 2  # of the operations that need more registers
_REGISTERS = 4  # bits of codes whose levels and limits are held in registers; those of more are read from memory
_VECTORS = CHUNK // LANES


def spread_bits(bits: int) -> np.ndarray:
    """Return for each byte two words of eight packed codes: of those that are positive, and its bits as codes 0 and 1.

    Codes count from the lowest level: m limits below, a positive number has half + m. A negative one has half − 1 − m,
    the same with all bits flipped: which the first word does with bits of m that are added to it by exclusive or.
    """
    dtype = np.uint32 if bits <= _REGISTERS else np.uint64
    byte = np.arange(256, dtype=np.uint64)
    places = [(byte >> np.uint64(i) & np.uint64(1)) << np.uint64(i * bits) for i in range(8)]
    ones = np.bitwise_or.reduce(places)
    half = 1 << (bits - 1)
    positive = ones * np.uint64(half) | (ones ^ ones[-1]) * np.uint64(half - 1)
    return np.stack([positive, ones]).astype(dtype)


@intrinsic(prefer_literal=True)
def greatest(typingctx: Any, x: Any, to: Any) -> Any:
    """Write the bits of the greatest magnitudes of 64 floats, one for each lane."""

    def write(on: Vectors, x: Any, to: Any) -> None:
        most = [on.bits(on.magnitude(on.load(x, i))) for i in range(_VECTORS)]
        while len(most) > 1:
            most = [on.greater(v, w) for v, w in zip(most[::2], most[1::2], strict=True)]
        on.store(most[0], to, 0, INTEGERS)

    return intrinsic_of(types.void, types.intp, types.intp, write=write)


@intrinsic(prefer_literal=True)
def across_lanes(typingctx: Any, parts: Any, to: Any, sums: Any) -> Any:
    """Write one number for each of eight vectors: the sum of its floats, or the greatest of its integers.

    Args:
        parts: address of the vectors.
        to: address of the eight numbers.
        sums: a constant, 1 or 0. Sums are those of halves of the lanes, then of halves of these sums.
    """

    def write(on: Vectors, parts: Any, to: Any, *_: Any) -> None:
        kind, join = (FLOATS, on.builder.fadd) if sums.literal_value else (INTEGERS, on.greater)
        held, n = [on.load(parts, i, kind) for i in range(LANES)], LANES
        while n > 1:
            n //= 2
            # A vector then holds in blocks of n lanes what is left of one after another.
            blocks = [lane for lane in range(2 * LANES) if not lane & n]
            first, second = (ir.Constant(INTEGERS, [lane + k for lane in blocks]) for k in (0, n))
            held = [
                join(on.builder.shuffle_vector(v, w, first), on.builder.shuffle_vector(v, w, second))
                for v, w in zip(held[::2], held[1::2], strict=True)
            ]
        on.store(held[0], to, 0, kind)

    return intrinsic_of(types.void, types.intp, types.intp, sums, write=write)


@intrinsic(prefer_literal=True)
def scale_and_turn(typingctx: Any, x: Any, factor: Any, words: Any, to: Any, squares: Any, before: Any) -> Any:
    """Write 64 floats times a factor, their signs flipped by the bits of words, then turned as `butterflies` does.

    Args:
        x, to: addresses of the floats and the results.
        factor: float32.
        words: address of the bits.
        squares: address of two vectors, whose numbers are sums of four squares of 32 products.
        before: as in `butterflies`, or 2: they are not turned.
    """

    def write(on: Vectors, x: Any, factor: Any, words: Any, to: Any, squares: Any, *_: Any) -> None:
        by, held, products = on.all(factor), [], []
        for i in range(_VECTORS):
            v = on.builder.fmul(on.load(x, i), by)
            products.append(on.builder.fmul(v, v))
            held.append(on.flip(v, on.signs(words, i)))
        on.store(on.folded(products[:4]), squares, 0)
        on.store(on.folded(products[4:]), squares, 1)
        turned = held if before.literal_value == 2 else on.butterflies(held)
        on.joined(turned, to, before.literal_value == 1)

    return intrinsic_of(types.void, types.intp, types.float32, *(types.intp,) * 3, before, write=write)


@intrinsic(prefer_literal=True)
def butterflies(typingctx: Any, x: Any, signs: Any, before: Any, size: Any) -> Any:
    """Take sums and differences among `size` floats, of neighbours first.

    Args:
        x: address of the floats.
        signs: address of as many words, whose highest bits flip the floats first; a constant 0 flips none.
        before: whether the 64 floats before `x` have been taken too: then they become the sums of both, those at `x`
            the differences; a constant 0 or 1.
        size: 8, 16, 32 or 64, a constant.
    """
    flips = not isinstance(signs, types.Literal)

    def write(on: Vectors, x: Any, signs: Any, *_: Any) -> None:
        held = [on.load(x, i) for i in range(size.literal_value // LANES)]
        if flips:
            held = [on.flip(v, on.load(signs, i, INTEGERS)) for i, v in enumerate(held)]
        on.joined(on.butterflies(held), x, before.literal_value == 1)

    return intrinsic_of(types.void, types.intp, types.intp if flips else signs, before, size, write=write)


@intrinsic
def across(typingctx: Any, x: Any, y: Any) -> Any:
    """Write the sums of 64 floats at two addresses to the first, and the differences to the second."""

    def write(on: Vectors, x: Any, y: Any) -> None:
        for i in range(_VECTORS):
            a, b = on.load(x, i), on.load(y, i)
            on.store(on.builder.fadd(a, b), x, i)
            on.store(on.builder.fsub(a, b), y, i)

    return intrinsic_of(types.void, types.intp, types.intp, write=write)


@intrinsic(prefer_literal=True)
def find_codes(
    typingctx: Any,
    r: Any,
    halves: Any,
    deviation: Any,
    levels: Any,
    edges: Any,
    spread: Any,
    count: Any,
    to: Any,
    parts: Any,
    bits: Any,
    alone: Any,
) -> Any:
    """Write the packed codes of floats, and for each 32 sums of magnitudes times levels, and of squares of levels.

    Args:
        r: address of the numbers.
        halves: how often 32.
        deviation: what the edges are multiplied by.
        levels, edges: addresses of the positive levels and of the edges between them, float32, eight at least.
        spread: address of `spread_bits`.
        count: how many of the floats the second sums have; all, if more.
        to: address of the codes; up to 8 bytes behind are overwritten.
        parts: address of a vector for each 32, whose numbers are sums of four products; 1 KiB behind those of squares.
        bits: of a code.
        alone: whether the sums of squares may be left out.
    """

    def write(on: Vectors, *arguments: Any) -> None:
        *given, bits, alone = arguments

        def write_bits(b_: int) -> None:
            if b_ not in (2, 3, 4):  # the usual numbers
                _write_codes(on, b_, True, *given)
                return
            with on.builder.if_else(on.builder.icmp_signed("!=", alone, ir.IntType(64)(0))) as (one, two):
                with one:
                    _write_codes(on, b_, False, *given)
                with two:
                    _write_codes(on, b_, True, *given)

        by_bits(on.builder, bits, write_bits)

    arguments = (types.intp, types.intp, types.float32, *(types.intp,) * 8)
    return intrinsic_of(types.void, *arguments, write=write)


def _write_codes(
    on: Vectors,
    b_: int,
    both: bool,
    r: Any,
    halves: Any,
    deviation: Any,
    levels: Any,
    edges: Any,
    spread: Any,
    count: Any,
    to: Any,
    parts: Any,
) -> None:
    """Write the code of `find_codes` for a number of bits, with second sums where `both`."""
    half, in_registers = 1 << (b_ - 1), b_ <= _REGISTERS
    b, long, word, σ = on.builder, ir.IntType(64), ir.IntType(32 if in_registers else 64), on.all(deviation)
    limits, held = (b.fmul(σ, on.load(edges, 0)), on.load(levels, 0)) if in_registers else (None, None)

    def packed(comparisons: Any, table: int) -> Any:
        byte = b.zext(b.bitcast(comparisons, ir.IntType(8)), long)
        at = b.add(spread, b.mul(b.add(byte, long(table * 256)), long(word.width // 8)))
        return b.load(b.inttoptr(at, word.as_pointer()), align=word.width // 8)

    def one(v: Any, place: Any, lanes: Any) -> tuple[Any, Any]:
        """Write the codes of a vector; return its products and squares."""
        size, index = on.magnitude(v), []
        codes = packed(on.above(v, ir.Constant(FLOATS, [0.0] * LANES)), 0)
        for k in reversed(range(b_ - 1)):  # the number of limits below, bit by bit
            middle = (1 << k) - 1
            if in_registers:
                limit = on.chosen(index, limits, range(middle, half - 1, 2 << k))
            else:
                below = b.shl(on.index(index), ir.Constant(INTEGERS, [k + 1] * LANES))
                limit = b.fmul(σ, on.gathered(b.add(edges, long(middle * 4)), below))
            index.append(on.above(size, limit))
            codes = b.xor(codes, b.shl(packed(index[-1], 1), word(k)))
        level = on.chosen(index, held, range(half)) if in_registers else on.gathered(levels, on.index(index))
        width = {1: 8, 2: 16}.get(b_, word.width)
        codes = b.trunc(codes, ir.IntType(width)) if width < word.width else codes
        b.store(codes, b.inttoptr(place, ir.IntType(width).as_pointer()), align=1)
        counts = b.icmp_signed("<", lanes, on.all(b.trunc(count, WORD), INTEGERS)) if both else None
        product, zero = b.fmul(size, level), ir.Constant(FLOATS, [0.0] * LANES)
        return product, b.select(counts, b.fmul(level, level), zero) if both else zero

    def found(at: Any) -> tuple[Any, Any]:
        lanes = on.all(b.trunc(at, WORD), INTEGERS)
        lanes = b.add(lanes, ir.Constant(INTEGERS, list(range(LANES)))) if both else None
        place = b.add(to, b.mul(b.udiv(at, long(LANES)), long(b_)))
        return one(on.load(b.add(r, b.mul(at, long(4))), 0), place, lanes)

    with cgutils.for_range(b, halves) as loop:
        first = b.mul(loop.index, long(HALF))
        if in_registers:
            results = [found(b.add(first, long(i))) for i in range(0, HALF, LANES)]
            products = [list(part) for part in zip(*results, strict=True)]
        else:  # a loop, whose code takes a quarter of the time to compile
            memory = [b.ptrtoint(cgutils.alloca_once(b, FLOATS, size=HALF // LANES), long) for _ in range(2)]
            with cgutils.for_range(b, long(HALF // LANES)) as inner:
                for result, place in zip(found(b.add(first, b.mul(inner.index, long(LANES)))), memory, strict=True):
                    on.store(result, b.add(place, b.mul(inner.index, long(LANES * 4))), 0)
            products = [[on.load(place, i) for i in range(HALF // LANES)] for place in memory]
        for i in range(2 if both else 1):
            on.store(on.folded(products[i]), b.add(parts, first), i * HALF)


@intrinsic(prefer_literal=True)
def levels_of(typingctx: Any, codes: Any, levels: Any, to: Any, bits: Any) -> Any:
    """Write the levels of 64 packed codes; up to 8 bytes behind the codes are read.

    Args:
        codes: address of the codes.
        levels: address of all levels, at least eight, repeated if they are fewer.
        to: address of the floats.
        bits: of a code.
    """

    def write(on: Vectors, codes: Any, levels: Any, to: Any, bits: Any) -> None:
        b = on.builder

        def write_bits(b_: int) -> None:
            of_word = ir.IntType(32 if b_ <= _REGISTERS else 64)
            wide = ir.VectorType(of_word, LANES)
            parts = [on.load(levels, i) for i in range(2 if b_ == 4 else 1)]
            for i in range(_VECTORS):
                place = b.inttoptr(b.add(codes, ir.IntType(64)(i * b_)), of_word.as_pointer())
                word = on.all(b.load(place, align=1), wide)
                code = b.lshr(word, ir.Constant(wide, [lane * b_ for lane in range(LANES)]))
                if on.can_permute and b_ <= _REGISTERS:  # by the lowest three bits of each
                    found = [on.permuted(part, code) for part in parts]
                    upper = b.trunc(b.lshr(code, ir.Constant(wide, [3] * LANES)), ir.VectorType(ir.IntType(1), LANES))
                    v = on.selected([upper] if b_ == 4 else [], found)
                else:
                    code = b.and_(code, ir.Constant(wide, [(1 << b_) - 1] * LANES))
                    v = on.gathered(levels, b.trunc(code, INTEGERS) if wide != INTEGERS else code)
                on.store(v, to, i)

        by_bits(b, bits, write_bits)

    return intrinsic_of(types.void, *(types.intp,) * 4, write=write)


@intrinsic(prefer_literal=True)
def flip_and_scale(typingctx: Any, x: Any, words: Any, factor: Any, limit: Any, to: Any) -> Any:
    """Write 64 floats, their signs flipped by the bits of words, times a factor, clamped to ±limit but NaN."""

    def write(on: Vectors, x: Any, words: Any, factor: Any, limit: Any, to: Any) -> None:
        for i in range(_VECTORS):
            on.store(on.scaled(on.flip(on.load(x, i), on.signs(words, i)), factor, limit), to, i)

    return intrinsic_of(types.void, types.intp, types.intp, types.float32, types.float32, types.intp, write=write)


@intrinsic(prefer_literal=True)
def turn_and_scale(
    typingctx: Any, x: Any, signs: Any, words: Any, factor: Any, limit: Any, to: Any, before: Any
) -> Any:
    """Do as `butterflies` with 64 floats and as `flip_and_scale` with the results, or with those of both chunks.

    Args:
        x: address of the floats.
        signs: address of as many words, whose highest bits flip the floats first.
        words, factor, limit, to: as in `flip_and_scale`, of the first result.
        before: a constant 0 or 1, as in `butterflies`.
    """

    def write(on: Vectors, x: Any, signs: Any, words: Any, factor: Any, limit: Any, to: Any, *_: Any) -> None:
        b, held = on.builder, [on.load(x, i) for i in range(_VECTORS)]
        held = on.butterflies([on.flip(v, on.load(signs, i, INTEGERS)) for i, v in enumerate(held)])
        for i, v in enumerate(held):
            results = [v]
            if before.literal_value:
                other = on.load(x, i - _VECTORS)
                results = [b.fadd(other, v), b.fsub(other, v)]
            for at, result in zip(range(i, 2 * _VECTORS, _VECTORS), results, strict=False):
                on.store(on.scaled(on.flip(result, on.signs(words, at)), factor, limit), to, at)

    floats = (types.float32, types.float32)
    return intrinsic_of(types.void, *(types.intp,) * 3, *floats, types.intp, before, write=write)
