"""Writes vectors of eight numbers for LLVM: the operations that those of vectors.py are made of."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 8
SIGN = -(2**31)
WORD = ir.IntType(32)
FLOATS, INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(WORD, LANES)
_SIZE = 4  # bytes of a number


class Vectors:
    """Writes operations on vectors, for a processor that can permute them (AVX2) or not."""

    def __init__(self, builder: Any, can_permute: bool) -> None:
        self.builder, self.can_permute = builder, can_permute

    def _pointer(self, address: Any, index: int, kind: Any) -> Any:
        place = self.builder.add(address, ir.IntType(64)(index * LANES * _SIZE))
        return self.builder.inttoptr(place, kind.as_pointer())

    def load(self, address: Any, index: int, kind: Any = FLOATS) -> Any:
        """Return vector `index` after an address."""
        return self.builder.load(self._pointer(address, index, kind), align=_SIZE)

    def store(self, v: Any, address: Any, index: int, kind: Any = FLOATS) -> None:
        """Write vector `index` after an address."""
        self.builder.store(v, self._pointer(address, index, kind), align=_SIZE)

    def scalar(self, address: Any, index: int, kind: Any) -> Any:
        """Return number `index` of 32 bits after an address."""
        place = self.builder.add(address, ir.IntType(64)(index * 4))
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()), align=4)

    def all(self, scalar: Any, kind: Any = FLOATS) -> Any:
        """Return a vector of one number."""
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, WORD(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(INTEGERS, [0] * LANES))

    def bits(self, v: Any) -> Any:
        """Return the bits of floats."""
        return self.builder.bitcast(v, INTEGERS)

    def flip(self, v: Any, signs: Any) -> Any:
        """Return floats with the signs flipped where the highest bit of `signs` is set, whose others are not."""
        return self.builder.bitcast(self.builder.xor(self.bits(v), signs), FLOATS)

    def signs(self, words: Any, index: int) -> Any:
        """Return the bits of vector `index` of the words at an address, 32 elements each, as signs."""
        word = self.all(self.scalar(words, index * LANES // 32, WORD), INTEGERS)
        places = ir.Constant(INTEGERS, [31 - (index * LANES + i) % 32 for i in range(LANES)])
        return self.builder.and_(self.builder.shl(word, places), ir.Constant(INTEGERS, [SIGN] * LANES))

    def magnitude(self, v: Any) -> Any:
        """Return the absolute values."""
        mask = ir.Constant(INTEGERS, [0x7FFFFFFF] * LANES)
        return self.builder.bitcast(self.builder.and_(self.bits(v), mask), FLOATS)

    def greater(self, v: Any, w: Any) -> Any:
        """Return the greater of integers."""
        return self.builder.select(self.builder.icmp_signed(">", v, w), v, w)

    def above(self, v: Any, limit: Any) -> Any:
        """Return whether numbers are greater than those of `limit`; NaN are not."""
        return self.builder.fcmp_ordered(">", v, limit)

    def selected(self, bits: list[Any], values: list[Any]) -> Any:
        """Return the value whose index has these bits, the highest first."""
        for bit in reversed(bits):
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self.builder.select(bit, high, low) for low, high in pairs]
        return values[0]

    def permuted(self, table: Any, index: Any) -> Any:
        """Return the floats of a vector at these indices, of which the lowest three bits count."""
        kind = ir.FunctionType(FLOATS, [FLOATS, INTEGERS])
        permute = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx2.permps")
        return self.builder.call(permute, [table, index])

    def chosen(self, bits: list[Any], table: Any, places: range) -> Any:
        """Return the floats of a vector at these places, of which `bits` choose, the highest first."""
        b = self.builder

        def arranged(order: list[int]) -> Any:
            return b.shuffle_vector(table, table, ir.Constant(INTEGERS, order))

        if self.can_permute and len(bits) > 1:  # one instruction for up to seven
            step = ir.Constant(INTEGERS, [places.step] * LANES)
            index = b.mul(self.index(bits), step)
            return self.permuted(arranged([(places.start + i) % LANES for i in range(LANES)]), index)
        return self.selected(bits, [arranged([place] * LANES) for place in places])

    def gathered(self, address: Any, index: Any) -> Any:
        """Return the floats at these indices after an address."""
        b, v = self.builder, ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            at = b.shl(b.zext(b.extract_element(index, WORD(lane)), ir.IntType(64)), ir.IntType(64)(2))
            v = b.insert_element(v, self.scalar(b.add(address, at), 0, ir.FloatType()), WORD(lane))
        return v

    def index(self, bits: list[Any]) -> Any:
        """Return the numbers with these bits, the highest first."""
        number = ir.Constant(INTEGERS, [0] * LANES)
        for bit in bits:
            one = ir.Constant(INTEGERS, [1] * LANES)
            number = self.builder.or_(self.builder.shl(number, one), self.builder.zext(bit, INTEGERS))
        return number

    def with_neighbour(self, v: Any, step: int) -> Any:
        """Return the sum of each number and the one at distance `step` in its vector, or their difference."""
        places = ir.Constant(INTEGERS, [i ^ step for i in range(LANES)])
        signs = ir.Constant(FLOATS, [-1.0 if i & step else 1.0 for i in range(LANES)])
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        # A product with ±1 is exact, so that it makes no difference whether it is merged with the sum.
        merged = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return self.builder.call(merged, [v, signs, self.builder.shuffle_vector(v, v, places)])

    def folded(self, parts: list[Any]) -> Any:
        """Return the sums of the numbers of four vectors: 16 of 32, eight of 16."""
        a, b, c, d = parts
        return self.builder.fadd(self.builder.fadd(a, c), self.builder.fadd(b, d))

    def scaled(self, v: Any, factor: Any, limit: Any) -> Any:
        """Return floats times a factor, clamped to ±limit but NaN."""
        high = self.all(limit)
        low, v = self.flip(high, ir.Constant(INTEGERS, [SIGN] * LANES)), self.builder.fmul(v, self.all(factor))
        v = self.builder.select(self.above(low, v), low, v)
        return self.builder.select(self.above(v, high), high, v)

    def butterflies(self, held: list[Any]) -> list[Any]:
        """Return sums and differences among the numbers of vectors, of neighbours first."""
        b = self.builder
        for step in (1, 2, 4):
            held = [self.with_neighbour(v, step) for v in held]
        step = 1
        while step < len(held):
            for i in range(len(held)):
                if not i & step:
                    held[i], held[i + step] = b.fadd(held[i], held[i + step]), b.fsub(held[i], held[i + step])
            step *= 2
        return held

    def joined(self, held: list[Any], to: Any, joins: bool) -> None:
        """Write vectors after an address; or, where they join those before it, sums there and differences here."""
        for i, v in enumerate(held):
            if joins:
                other = self.load(to, i - len(held))
                self.store(self.builder.fadd(other, v), to, i - len(held))
                v = self.builder.fsub(other, v)
            self.store(v, to, i)


def intrinsic_of(result: Any, *arguments: Any, write: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a signature, and what writes the code of an intrinsic: `write` of vectors and arguments."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = write(Vectors(builder, "+avx2" in context.codegen().magic_tuple()[2]), *args)
        return context.get_dummy_value() if value is None else value

    return result(*arguments), generate


def by_bits(builder: Any, bits: Any, write: Callable[[int], None]) -> None:
    """Write code for each number of bits, and a branch to that of `bits`, which is known when the code runs."""
    end = builder.append_basic_block("bits.end")
    choice = builder.switch(bits, end)
    for n in range(1, 9):
        block = builder.append_basic_block(f"bits.{n}")
        choice.add_case(ir.IntType(64)(n), block)
        builder.position_at_end(block)
        write(n)
        builder.branch(end)
    builder.position_at_end(end)
