"""Vectors of eight numbers, written for LLVM: what loops over a group of rotated codes are made of.

LLVM makes vectors of most loops by itself, but not of those that exchange neighbours, and Numba's integers are of 64
bits. An operation takes 64 numbers from an address on: they fill half of a processor's sixteen registers of 256 bits.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

CHUNK = 64  # numbers of an operation
LANES = 8
_VECTORS = CHUNK // LANES
_SIGN = -(2**31)
_WORD = ir.IntType(32)
_FLOATS, _INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_WORD, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SIZES = {_FLOATS: 4, _INTEGERS: 4, _BYTES: 1}


class _Vectors:
    """Writes operations on vectors."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _pointer(self, address: Any, index: int, kind: Any) -> Any:
        place = self.builder.add(address, ir.IntType(64)(index * LANES * _SIZES[kind]))
        return self.builder.inttoptr(place, kind.as_pointer())

    def load(self, address: Any, index: int, kind: Any = _FLOATS) -> Any:
        """Return vector `index` after an address."""
        return self.builder.load(self._pointer(address, index, kind), align=_SIZES[kind])

    def store(self, v: Any, address: Any, index: int, kind: Any = _FLOATS) -> None:
        """Write vector `index` after an address."""
        self.builder.store(v, self._pointer(address, index, kind), align=_SIZES[kind])

    def scalar(self, address: Any, index: int, kind: Any) -> Any:
        """Return number `index` of 32 bits after an address."""
        place = self.builder.add(address, ir.IntType(64)(index * 4))
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()), align=4)

    def all(self, scalar: Any, kind: Any = _FLOATS) -> Any:
        """Return a vector of one number."""
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _WORD(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(_INTEGERS, [0] * LANES))

    def bits(self, v: Any) -> Any:
        """Return the bits of floats."""
        return self.builder.bitcast(v, _INTEGERS)

    def flip(self, v: Any, signs: Any) -> Any:
        """Return floats with the signs flipped where the highest bit of `signs` is set, whose others are not."""
        return self.builder.bitcast(self.builder.xor(self.bits(v), signs), _FLOATS)

    def signs(self, words: Any, index: int) -> Any:
        """Return the bits of vector `index` of the words at an address, 32 elements each, as signs."""
        word = self.all(self.scalar(words, index * LANES // 32, _WORD), _INTEGERS)
        places = ir.Constant(_INTEGERS, [31 - (index * LANES + i) % 32 for i in range(LANES)])
        return self.builder.and_(self.builder.shl(word, places), ir.Constant(_INTEGERS, [_SIGN] * LANES))

    def magnitude(self, v: Any) -> Any:
        """Return the absolute values."""
        mask = ir.Constant(_INTEGERS, [0x7FFFFFFF] * LANES)
        return self.builder.bitcast(self.builder.and_(self.bits(v), mask), _FLOATS)

    def above(self, v: Any, limit: Any) -> Any:
        """Return whether numbers are greater than those of `limit`; NaN are not."""
        return self.builder.fcmp_ordered(">", v, limit)

    def chosen(self, outer: list[Any], levels: list[Any]) -> Any:
        """Return the level behind the last of increasing limits that a number is above."""
        level = levels[0]
        for beyond, next_level in zip(outer, levels[1:], strict=True):
            level = self.builder.select(beyond, next_level, level)
        return level

    def with_neighbour(self, v: Any, step: int) -> Any:
        """Return the sum of each number and the one at distance `step` in its vector, or their difference."""
        places = ir.Constant(_INTEGERS, [i ^ step for i in range(LANES)])
        signs = ir.Constant(_FLOATS, [-1.0 if i & step else 1.0 for i in range(LANES)])
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        # A product with ±1 is exact, so that it makes no difference whether it is merged with the sum.
        merged = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return self.builder.call(merged, [v, signs, self.builder.shuffle_vector(v, v, places)])

    def tree_sum(self, parts: list[Any]) -> Any:
        """Return the sum of numbers, 32 in four vectors, by halves; then of pairs of these sums and so on."""
        sums = []
        for first in range(0, len(parts), 4):
            a, b, c, d = parts[first : first + 4]
            v, n = self.builder.fadd(self.builder.fadd(a, c), self.builder.fadd(b, d)), LANES
            while n > 1:
                n //= 2
                kind = ir.VectorType(_WORD, n)
                low, high = (
                    self.builder.shuffle_vector(v, v, ir.Constant(kind, list(range(k, k + n)))) for k in (0, n)
                )
                v = self.builder.fadd(low, high)
            sums.append(self.builder.extract_element(v, _WORD(0)))
        while len(sums) > 1:
            sums = [self.builder.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        return sums[0]


def _of(result: Any, *arguments: Any, write: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a signature, and what writes the code of an intrinsic: `write` of vectors and arguments."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = write(_Vectors(builder), *args)
        return context.get_dummy_value() if value is None else value

    return result(*arguments), generate


@intrinsic(prefer_literal=True)
def greatest(typingctx: Any, x: Any) -> Any:
    """Return the bits of the greatest magnitude of 64 floats."""

    def write(on: _Vectors, x: Any) -> Any:
        b = on.builder
        most = [on.bits(on.magnitude(on.load(x, i))) for i in range(_VECTORS)]
        while len(most) > 1:
            most = [b.select(b.icmp_signed(">", v, w), v, w) for v, w in zip(most[::2], most[1::2], strict=True)]
        v, n = most[0], LANES
        while n > 1:
            n //= 2
            places = ir.Constant(_INTEGERS, [(i + n) % LANES for i in range(LANES)])
            other = b.shuffle_vector(v, v, places)
            v = b.select(b.icmp_signed(">", v, other), v, other)
        return b.extract_element(v, _WORD(0))

    return _of(types.int32, types.intp, write=write)


@intrinsic(prefer_literal=True)
def scale_and_flip(typingctx: Any, x: Any, factor: Any, words: Any, to: Any) -> Any:
    """Write 64 floats times a factor, their signs flipped by the bits of words; return the sum of their squares."""

    def write(on: _Vectors, x: Any, factor: Any, words: Any, to: Any) -> Any:
        by, squares = on.all(factor), []
        for i in range(_VECTORS):
            v = on.builder.fmul(on.load(x, i), by)
            squares.append(on.builder.fmul(v, v))
            on.store(on.flip(v, on.signs(words, i)), to, i)
        return on.tree_sum(squares)

    return _of(types.float32, types.intp, types.float32, types.intp, types.intp, write=write)


@intrinsic(prefer_literal=True)
def butterflies(typingctx: Any, x: Any, signs: Any, before: Any) -> Any:
    """Take sums and differences among 64 floats, of neighbours first.

    Args:
        x: address of the floats.
        signs: address of 64 words, whose highest bits flip the floats first; a constant 0 flips none.
        before: whether the 64 floats before `x` have been taken too: then they become the sums of both, those at `x`
            the differences; a constant 0 or 1.
    """
    flips, joins = not isinstance(signs, types.Literal), before.literal_value

    def write(on: _Vectors, x: Any, signs: Any, *_: Any) -> None:
        b, held = on.builder, [on.load(x, i) for i in range(_VECTORS)]
        if flips:
            held = [on.flip(v, on.load(signs, i, _INTEGERS)) for i, v in enumerate(held)]
        for step in (1, 2, 4):
            held = [on.with_neighbour(v, step) for v in held]
        for step in (1, 2, 4):
            for i in range(_VECTORS):
                if not i & step:
                    held[i], held[i + step] = b.fadd(held[i], held[i + step]), b.fsub(held[i], held[i + step])
        for i, v in enumerate(held):
            if joins:
                other = on.load(x, i - _VECTORS)
                on.store(b.fadd(other, v), x, i - _VECTORS)
                v = b.fsub(other, v)
            on.store(v, x, i)

    return _of(types.void, types.intp, types.intp if flips else signs, before, write=write)


@intrinsic
def across(typingctx: Any, x: Any, y: Any) -> Any:
    """Write the sums of 64 floats at two addresses to the first, and the differences to the second."""

    def write(on: _Vectors, x: Any, y: Any) -> None:
        for i in range(_VECTORS):
            a, b = on.load(x, i), on.load(y, i)
            on.store(on.builder.fadd(a, b), x, i)
            on.store(on.builder.fsub(a, b), y, i)

    return _of(types.void, types.intp, types.intp, write=write)


@intrinsic(prefer_literal=True)
def find_codes(typingctx: Any, r: Any, limits: Any, levels: Any, codes: Any, bits: Any) -> Any:
    """Write the codes of 64 floats; return the sum of magnitudes times levels. For 1 to 4 bits.

    Args:
        r: address of the numbers.
        limits, levels: addresses of the limits between magnitudes and of the positive levels, float32.
        codes: address of the codes, a byte each.
        bits: of a code, a constant.
    """
    half = 1 << (bits.literal_value - 1)

    def write(on: _Vectors, r: Any, limits: Any, levels: Any, codes: Any, *_: Any) -> Any:
        b = on.builder
        at = [on.all(on.scalar(limits, k, ir.FloatType())) for k in range(half - 1)]
        of = [on.all(on.scalar(levels, k, ir.FloatType())) for k in range(half)]
        terms = []
        for i in range(_VECTORS):
            v = on.load(r, i)
            size = on.magnitude(v)
            outer = [on.above(size, limit) for limit in at]
            terms.append(b.fmul(size, on.chosen(outer, of)))
            number = ir.Constant(_INTEGERS, [0] * LANES)
            for beyond in outer:
                number = b.sub(number, b.sext(beyond, _INTEGERS))
            # half + m above 0, else half − 1 − m
            lower = b.not_(b.sext(on.above(v, ir.Constant(_FLOATS, [0.0] * LANES)), _INTEGERS))
            code = b.add(b.xor(number, lower), ir.Constant(_INTEGERS, [half] * LANES))
            on.store(b.trunc(code, _BYTES), codes, i, _BYTES)
        return on.tree_sum(terms)

    return _of(types.float32, *(types.intp,) * 4, bits, write=write)


@intrinsic(prefer_literal=True)
def levels_of(typingctx: Any, codes: Any, levels: Any, to: Any, bits: Any) -> Any:
    """Write the levels of 64 codes, a byte each. For 1 to 4 bits; arguments as for `find_codes`."""
    half = 1 << (bits.literal_value - 1)

    def write(on: _Vectors, codes: Any, levels: Any, to: Any, *_: Any) -> None:
        b = on.builder
        of = [on.all(on.scalar(levels, k, ir.FloatType())) for k in range(half)]
        for i in range(_VECTORS):
            code = b.sub(b.zext(on.load(codes, i, _BYTES), _INTEGERS), ir.Constant(_INTEGERS, [half] * LANES))
            lower = b.ashr(code, ir.Constant(_INTEGERS, [31] * LANES))
            number = b.xor(code, lower)
            outer = [b.icmp_signed(">", number, ir.Constant(_INTEGERS, [k] * LANES)) for k in range(half - 1)]
            sign = b.and_(lower, ir.Constant(_INTEGERS, [_SIGN] * LANES))
            on.store(on.flip(on.chosen(outer, of), sign), to, i)

    return _of(types.void, *(types.intp,) * 3, bits, write=write)


@intrinsic(prefer_literal=True)
def flip_and_scale(typingctx: Any, x: Any, words: Any, factor: Any, limit: Any) -> Any:
    """Flip the signs of 64 floats by the bits of words, multiply by a factor, and clamp to ±limit but NaN."""

    def write(on: _Vectors, x: Any, words: Any, factor: Any, limit: Any, *_: Any) -> None:
        b, by, high = on.builder, on.all(factor), on.all(limit)
        low = on.flip(high, ir.Constant(_INTEGERS, [_SIGN] * LANES))
        for i in range(_VECTORS):
            v = b.fmul(on.flip(on.load(x, i), on.signs(words, i)), by)
            v = b.select(on.above(low, v), low, v)
            on.store(b.select(on.above(v, high), high, v), x, i)

    return _of(types.void, types.intp, types.intp, types.float32, types.float32, write=write)
