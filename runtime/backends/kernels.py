"""The CPU kernels, in Numba: encode a stretch of a tensor, multiply a stretch of a gradient.

Both take raw addresses of dense memory and a range of blocks, hold no lock, and may run on any thread.

Order without floats. Read as integers, the bits of floating-point numbers are in order once the magnitude of negative
ones is flipped; NaN is put above everything. So one comparison serves float16, bfloat16, float32 and float64, and a
boundary is a key of the same kind.

Codes without a lookup. code(x) = c_0 + Σ_i [x > b_i] (c_{i+1} − c_i): a sum over boundaries that compiles to vector
instructions. Past `LINEAR_LIMIT` boundaries a branch-free binary search takes over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

BLOCK = 512  # elements worked on at once: what one block needs stays in the first-level cache
GROUP = 8
LINEAR_LIMIT = 96


@intrinsic
def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """Turn an integer address into a pointer to the type of the array or scalar `like`."""
    kind = like.dtype if isinstance(like, types.Array) else like
    signature = types.CPointer(kind)(address, like)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, generate


# What the next two do is chosen by the name of the format, a constant of the kernel that calls them. (Functions held in
# the kernel's closure would do as well, but Numba could not find such a kernel in its disk cache again.)


@intrinsic(prefer_literal=True)
def _widen(typingctx: Any, value: Any, name: Any) -> Any:
    """Turn a stored value of the float format `name` into the type of arithmetic."""
    format_name = name.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if format_name == "float16":
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        if format_name == "bfloat16":
            word = ir.IntType(32)
            return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())
        return args[0]

    return (types.float32 if value == types.uint16 else value)(value, name), generate


@intrinsic(prefer_literal=True)
def _narrow(typingctx: Any, value: Any, name: Any) -> Any:
    """Round to the float format `name`: to nearest, ties to even; a NaN stays one."""
    format_name = name.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if format_name == "float16":
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        if format_name == "bfloat16":
            word = ir.IntType(32)
            bits = builder.bitcast(args[0], word)
            upper = builder.lshr(bits, word(16))
            odd = builder.and_(upper, word(1))
            rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.trunc(builder.select(is_nan, builder.or_(upper, word(0x40)), rounded), ir.IntType(16))
        return args[0]

    return (types.uint16 if format_name in ("float16", "bfloat16") else value)(value, name), generate


@intrinsic
def _store_word(typingctx: Any, address: Any, word: Any) -> Any:
    """Write a uint64 at any address, aligned or not."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64), generate


@njit(inline="always")
def _vector(address: Any, like: Any, n: Any) -> Any:
    """View `n` elements of the type of `like` at an address."""
    return carray(_pointer(address, like), (n,))  # pyright: ignore[reportCallIssue]


@dataclass(frozen=True)
class FloatFormat:
    """How a floating-point type lies in memory.

    Attributes:
        integer: the signed integer type of its size.
        infinity: the bits of +∞.
        stored: the type that `multiply` reads and writes.
    """

    integer: type[np.signedinteger]
    infinity: int
    stored: type[np.generic]

    def keys(self, bits: np.ndarray) -> np.ndarray:
        """Return the order-preserving keys of numbers given by their bits, −0 and +0 alike."""
        bits = bits.astype(self.integer)
        top = np.iinfo(self.integer).max
        keys = np.where(bits < 0, bits ^ top, bits)
        return np.where(bits == ~top, 0, keys).astype(self.integer)


FORMATS: dict[str, FloatFormat] = {
    "float64": FloatFormat(np.int64, 0x7FF0_0000_0000_0000, np.float64),
    "float32": FloatFormat(np.int32, 0x7F80_0000, np.float32),
    "float16": FloatFormat(np.int16, 0x7C00, np.uint16),
    "bfloat16": FloatFormat(np.int16, 0x7F80, np.uint16),
}


@cache
def encode_kernel(name: str) -> Callable[..., None]:
    """Return encode(x, n, boundaries, steps, first, codes, bits, packed, begin, end) for a float format.

    Args of the kernel:
        x: address of n elements.
        boundaries: (m − 1,) keys, increasing; for the search padded with the top key to 2^p − 1.
        steps: (m − 1,) code differences c_{i+1} − c_i, in the integer type; empty chooses the search.
        first: c_0.
        codes: uint8 (2^p,), the code of every interval; used by the search alone.
        packed: address of the packed bytes.
        begin, end: blocks of `BLOCK` elements to do.
    """
    integer = FORMATS[name].integer
    infinity = integer(FORMATS[name].infinity)
    top = integer(np.iinfo(integer).max)
    sign = integer(np.iinfo(integer).bits - 1)
    nothing = integer(0)

    @njit(nogil=True, cache=True, error_model="numpy")
    def encode(x, n, boundaries, steps, first, codes, bits, packed, begin, end):  # noqa: ANN001, ANN202
        source = _vector(x, boundaries, n)
        size = (n + GROUP - 1) // GROUP * bits
        target = _vector(packed, codes, size)
        keys = np.empty(BLOCK, integer)
        code = np.empty(BLOCK, integer)
        interval = np.empty(BLOCK, np.uint32)
        small = np.empty(BLOCK, np.uint8)
        lanes = small.view(np.uint64)
        words = np.empty(BLOCK // GROUP, np.uint64)
        staged = np.empty(BLOCK + 8, np.uint8)
        stage = staged.ctypes.data
        b = np.uint64(bits)
        odd_bytes = np.uint64(0xFF00FF00FF00FF00)
        odd_pairs = np.uint64(0xFFFF0000FFFF0000)
        odd_quads = np.uint64(0xFFFFFFFF00000000)
        for block in range(begin, end):
            count = min(BLOCK, n - block * BLOCK)
            part = source[block * BLOCK : block * BLOCK + count]
            for j in range(count):
                value = part[j]
                magnitude = integer(value & top)
                key = integer(value ^ (integer(value >> sign) & top))
                keys[j] = top if magnitude > infinity else key
            if steps.size == boundaries.size:
                for j in range(count):
                    code[j] = first
                for i in range(0, boundaries.size - 1, 2):  # in pairs: half the traffic with the cache
                    b0, b1, s0, s1 = boundaries[i], boundaries[i + 1], steps[i], steps[i + 1]
                    for j in range(count):
                        key = keys[j]
                        code[j] += (s0 if key > b0 else nothing) + (s1 if key > b1 else nothing)
                if boundaries.size % 2:
                    b0, s0 = boundaries[-1], steps[-1]
                    for j in range(count):
                        code[j] += s0 if keys[j] > b0 else nothing
                for j in range(count):
                    small[j] = np.uint8(code[j])
            else:
                for j in range(count):
                    interval[j] = 0
                stride = (boundaries.size + 1) // 2
                while stride > 0:
                    middle = boundaries[stride - 1 :]
                    for j in range(count):
                        interval[j] += np.uint32(stride) if keys[j] > middle[interval[j]] else np.uint32(0)
                    stride //= 2
                for j in range(count):
                    small[j] = codes[interval[j]]
            small[count:] = 0
            groups = (count + GROUP - 1) // GROUP
            # Eight bytes of b used bits each, halved three times into one word of 8b bits.
            for g in range(groups):
                w = lanes[g]
                w = (w & ~odd_bytes) | ((w & odd_bytes) >> (np.uint64(8) - b))
                w = (w & ~odd_pairs) | ((w & odd_pairs) >> (np.uint64(16) - b - b))
                w = (w & ~odd_quads) | ((w & odd_quads) >> (np.uint64(32) - b * np.uint64(4)))
                words[g] = w
            # Each word is written whole, 8 − b bytes of zeros and all, and the next overwrites those.
            for g in range(groups):
                _store_word(stage + g * bits, words[g])  # pyright: ignore[reportCallIssue]
            base = block * (BLOCK // GROUP) * bits
            target[base : base + groups * bits] = staged[: groups * bits]

    return encode


@cache
def multiply_kernel(name: str, selects: bool) -> Callable[..., None]:
    """Return multiply(grad, n, packed, bits, levels, result, begin, end) for a float format.

    If it `selects`, a level of 0 gives 0 whatever the gradient; else ∞·0 is NaN.

    Args of the kernel:
        grad, result: addresses of n elements.
        packed: address of the packed codes.
        levels: (2^bits,) in the type of arithmetic, padded at will: any code may be looked up.
        begin, end: blocks of `BLOCK` elements to do.
    """
    zero = FORMATS[name].stored(0)
    nothing = np.float64(0) if name == "float64" else np.float32(0)

    @njit(nogil=True, cache=True, error_model="numpy")
    def multiply(grad, n, packed, bits, levels, result, begin, end):  # noqa: ANN001, ANN202
        source = _vector(grad, zero, n)
        target = _vector(result, zero, n)
        codes = _vector(packed, np.uint8(0), (n + GROUP - 1) // GROUP * bits)
        mask = np.uint64((1 << bits) - 1)
        b = np.uint64(bits)
        factors = np.empty(BLOCK, levels.dtype)
        for block in range(begin, end):
            count = min(BLOCK, n - block * BLOCK)
            base = block * (BLOCK // GROUP) * bits
            for g in range((count + GROUP - 1) // GROUP):
                w = np.uint64(0)
                part = codes[base + g * bits : base + g * bits + bits]
                for k in range(bits):
                    w |= np.uint64(part[k]) << np.uint64(8 * k)
                eight = factors[g * GROUP : g * GROUP + GROUP]
                for j in range(GROUP):
                    eight[j] = levels[(w >> (np.uint64(j) * b)) & mask]
            x = source[block * BLOCK : block * BLOCK + count]
            y = target[block * BLOCK : block * BLOCK + count]
            for j in range(count):
                y[j] = _narrow(_widen(x[j], name) * factors[j], name)  # pyright: ignore[reportCallIssue]
            if selects:  # in a loop of its own: a choice in the one above makes it twice as slow in memory
                for j in range(count):
                    if factors[j] == nothing:
                        y[j] = zero

    return multiply
