"""Numba kernels of activations: encode a tensor, look up 16-bit numbers in a table, multiply a gradient by levels.

Each is compiled code that takes the address of a job (see threads.py): 64-bit words, the number of parts taken, of
parts and of blocks, then the kernel's arguments, numbers and addresses of dense memory. It takes one part after another
and processes its blocks, on any thread.

Order without floats. Read as integers, the bits of floating-point numbers are in order once the magnitude of negative
ones is flipped; NaN ranks above everything. So one comparison serves float16, bfloat16, float32 and float64, and
boundaries are keys of the same kind.

Codes without a lookup. code(x) = c_0 + Σ_i [x > b_i] (c_{i+1} − c_i): a sum over boundaries that compiles to vector
instructions. Past `LINEAR_LIMIT` boundaries a branch-free binary search takes over.
"""

import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, config, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from .compilation import compile_kernel
from .threads import JOB_WORDS, Kernel

BLOCK = 512  # elements processed at once, so that a block's data stay in the first-level cache
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


# float16 by integers where the processor may have no instructions for it: without F16C, on x86 before 2012 or for
# NUMBA_CPU_NAME=generic, LLVM calls functions of compilers' libraries (`__extendhfsf2`), which are not in Python's
# process: such a kernel ended in a segmentation fault.

_WORD, _SINGLE = ir.IntType(32), ir.FloatType()
_REBIAS = 112 << 23  # of exponents, in the bits of a float32
_INFINITY, _QUIET = 0x7F800000, 0x00400000


def _widen_half(builder: Any, stored: Any) -> Any:
    """Write the conversion of a float16, given as uint16, to float32."""
    if _converts_halves():
        return builder.fpext(builder.bitcast(stored, ir.HalfType()), _SINGLE)
    bits = builder.zext(stored, _WORD)
    size = builder.and_(bits, _WORD(0x7FFF))
    moved = builder.shl(size, _WORD(13))
    normal = builder.add(moved, _WORD(_REBIAS))
    # Not as a subnormal float32, which `set_flush_denormal` makes 0.
    subnormal = builder.bitcast(builder.fmul(builder.uitofp(size, _SINGLE), _SINGLE(2.0**-24)), _WORD)
    special = builder.or_(moved, _WORD(_INFINITY))
    nan = builder.or_(special, _WORD(_QUIET))
    found = builder.select(builder.icmp_unsigned("<", size, _WORD(0x400)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned(">=", size, _WORD(0x7C00)), special, found)
    found = builder.select(builder.icmp_unsigned(">", size, _WORD(0x7C00)), nan, found)
    sign = builder.shl(builder.and_(bits, _WORD(0x8000)), _WORD(16))
    return builder.bitcast(builder.or_(found, sign), _SINGLE)


def _narrow_half(builder: Any, x: Any) -> Any:
    """Write the conversion of a float32 to the nearest float16, as uint16."""
    if _converts_halves():
        return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
    bits = builder.bitcast(x, _WORD)
    size = builder.and_(bits, _WORD(0x7FFFFFFF))
    upper = builder.lshr(size, _WORD(13))
    odd = builder.and_(upper, _WORD(1))
    rounded = builder.add(size, builder.add(odd, _WORD(0xFFF)))
    normal = builder.lshr(builder.sub(rounded, _WORD(_REBIAS)), _WORD(13))
    # Beside a half a float32 has the steps of float16's subnormal numbers.
    beside_half = builder.bitcast(builder.fadd(builder.bitcast(size, _SINGLE), _SINGLE(0.5)), _WORD)
    subnormal = builder.sub(beside_half, _WORD(0x3F000000))
    nan = builder.or_(builder.and_(upper, _WORD(0x3FF)), _WORD(0x7E00))
    found = builder.select(builder.icmp_unsigned("<", size, _WORD(0x38800000)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned(">=", size, _WORD(0x477FF000)), _WORD(0x7C00), found)  # 65,520
    found = builder.select(builder.icmp_unsigned(">", size, _WORD(_INFINITY)), nan, found)
    sign = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(0x8000))
    return builder.trunc(builder.or_(found, sign), ir.IntType(16))


def _converts_halves() -> bool:
    """Return whether Numba compiles for a processor known to convert float16 itself."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    asked = getattr(config, "CPU_NAME", None)  # NUMBA_CPU_NAME
    return not asked and bool(binding.get_host_cpu_features().get("f16c", False))


# The format's name, a constant in the calling kernel, selects what the next two do. (Functions in the kernel's closure
# would work too, but Numba would not find such a kernel in its disk cache.)


@intrinsic(prefer_literal=True)
def _widen(typingctx: Any, value: Any, name: Any) -> Any:
    """Convert a stored value of the float format `name` to the type of arithmetic."""
    format_name = name.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if format_name == "float16":
            return _widen_half(builder, args[0])
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
            return _narrow_half(builder, args[0])
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


@intrinsic
def _load_word(typingctx: Any, address: Any) -> Any:
    """Read a uint64 at any address, aligned or not."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.intp), generate


@intrinsic
def _take(typingctx: Any, job: Any) -> Any:
    """Return the next part of a job that no thread has taken."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@njit(inline="always")
def _vector(address: Any, like: Any, n: Any) -> Any:
    """View `n` elements of the type of `like` at an address."""
    return carray(_pointer(address, like), (n,))  # pyright: ignore[reportCallIssue]


@dataclass(frozen=True)
class FloatFormat:
    """Memory format of a floating-point type.

    Attributes:
        integer: signed integer type of the same size.
        infinity: bits of +∞.
        stored: type that `multiply` reads and writes.
    """

    integer: type[np.signedinteger]
    infinity: int
    stored: type[np.generic]

    def keys(self, bits: np.ndarray) -> np.ndarray:
        """Return the order-preserving keys of numbers given by their bits; −0 and +0 have the same key."""
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


@njit(inline="always")
def _pack(small: Any, count: Any, bits: Any, staged: Any, target: Any, block: Any) -> None:
    """Pack `count` codes, a byte each in `small`, into `target` from block `block` on; `staged` is scratch memory."""
    # Memory by address, and loops: views and slices of arrays take longer than packing a block.
    groups = (count + GROUP - 1) // GROUP
    lanes = _vector(np.int64(small.ctypes.data), np.uint64(0), groups)
    stage = np.int64(staged.ctypes.data)
    for j in range(count, groups * GROUP):
        small[j] = 0
    base = block * (BLOCK // GROUP) * bits
    # Eight bytes of b used bits each, halved three times into one word of 8b bits. Constant shifts for the usual
    # numbers of bits, and stores of words of 2 and 4 bytes, make this several times faster.
    if bits == 2:
        pairs = _vector(target.ctypes.data + base, np.uint16(0), groups)
        for g in range(groups):
            pairs[g] = np.uint16(_halved(lanes[g], 2))
    elif bits == 4:
        quads = _vector(target.ctypes.data + base, np.uint32(0), groups)
        for g in range(groups):
            quads[g] = np.uint32(_halved(lanes[g], 4))
    elif bits == 3 and groups % 4 == 0:  # four groups of 24 bits are three words of 32
        for g in range(groups):
            lanes[g] = _halved(lanes[g], 3)
        triples = _vector(target.ctypes.data + base, np.uint32(0), groups // 4 * 3)
        for i in range(groups // 4):
            a, b, c, d = lanes[4 * i], lanes[4 * i + 1], lanes[4 * i + 2], lanes[4 * i + 3]
            triples[3 * i] = np.uint32((a | b << np.uint64(24)) & np.uint64(0xFFFFFFFF))
            triples[3 * i + 1] = np.uint32((b >> np.uint64(8) | c << np.uint64(16)) & np.uint64(0xFFFFFFFF))
            triples[3 * i + 2] = np.uint32((c >> np.uint64(16) | d << np.uint64(8)) & np.uint64(0xFFFFFFFF))
    else:
        # Each word is written whole, with 8 − b zero bytes that the next one overwrites.
        for g in range(groups):
            lanes[g] = _halved(lanes[g], bits)
        for g in range(groups):
            _store_word(stage + g * bits, lanes[g])  # pyright: ignore[reportCallIssue]
        for i in range(groups * bits):
            target[base + i] = staged[i]


@njit(inline="always")
def _halved(w: Any, bits: Any) -> Any:
    """Return the word of 8b bits made of eight bytes with b used bits each."""
    b = np.uint64(bits)
    odd_bytes = np.uint64(0xFF00FF00FF00FF00)
    odd_pairs = np.uint64(0xFFFF0000FFFF0000)
    odd_quads = np.uint64(0xFFFFFFFF00000000)
    w = (w & ~odd_bytes) | ((w & odd_bytes) >> (np.uint64(8) - b))
    w = (w & ~odd_pairs) | ((w & odd_pairs) >> (np.uint64(16) - b - b))
    return (w & ~odd_quads) | ((w & odd_quads) >> (np.uint64(32) - b * np.uint64(4)))


@cache
def encode_kernel(name: str) -> Kernel:
    """Return the kernel that encodes a tensor of a float format.

    Arguments in the job:
        x, n: address of n elements.
        boundaries, m: address of m increasing keys, padded with the top key: to a multiple of 4, or for the search to
            2^p − 1.
        steps: address of the m code differences c_{i+1} − c_i, in the integer type; 0 chooses the search.
        codes: address of the codes, uint8: of the first interval, for the search of all m + 1.
        bits: number of bits in a code.
        packed: address of the packed bytes.
    """
    integer = FORMATS[name].integer
    infinity = integer(FORMATS[name].infinity)
    top = integer(np.iinfo(integer).max)
    sign = integer(np.iinfo(integer).bits - 1)
    nothing = integer(0)

    def encode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, n = words[1], words[2], words[3], words[4]
        boundaries_at, m, steps_at, codes_at, bits, packed = words[5], words[6], words[7], words[8], words[9], words[10]
        source = _vector(x, nothing, n)
        target = _vector(packed, np.uint8(0), (n + GROUP - 1) // GROUP * bits)
        boundaries = _vector(boundaries_at, nothing, m)
        steps = _vector(steps_at, nothing, m)
        codes = _vector(codes_at, np.uint8(0), m + 1)
        first = integer(codes[0])
        keys = np.empty(BLOCK, integer)
        code = np.empty(BLOCK, integer)
        interval = np.empty(BLOCK, np.uint32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        while True:
            part_number = _take(job)  # pyright: ignore[reportCallIssue]
            if part_number >= parts:
                return
            for block in range(blocks * part_number // parts, blocks * (part_number + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                part = source[block * BLOCK : block * BLOCK + count]
                for j in range(count):
                    value = part[j]
                    magnitude = integer(value & top)
                    key = integer(value ^ (integer(value >> sign) & top))
                    keys[j] = top if magnitude > infinity else key
                if steps_at:
                    for j in range(count):
                        code[j] = first
                    for i in range(0, m, 4):  # in fours: a quarter of the traffic with the cache
                        b0, b1, b2, b3 = boundaries[i], boundaries[i + 1], boundaries[i + 2], boundaries[i + 3]
                        s0, s1, s2, s3 = steps[i], steps[i + 1], steps[i + 2], steps[i + 3]
                        for j in range(count):
                            key = keys[j]
                            low = (s0 if key > b0 else nothing) + (s1 if key > b1 else nothing)
                            high = (s2 if key > b2 else nothing) + (s3 if key > b3 else nothing)
                            code[j] += low + high
                    for j in range(count):
                        small[j] = np.uint8(code[j])
                else:
                    for j in range(count):
                        interval[j] = 0
                    stride = (m + 1) // 2
                    while stride > 0:
                        middle = boundaries[stride - 1 :]
                        for j in range(count):
                            interval[j] += np.uint32(stride) if keys[j] > middle[interval[j]] else np.uint32(0)
                        stride //= 2
                    for j in range(count):
                        small[j] = codes[interval[j]]
                _pack(small, count, bits, staged, target, block)

    return compile_kernel(encode)


@cache
def look_up_kernel() -> Kernel:
    """Return the kernel that looks up f(x) and the code of a 16-bit x in a table of all 65,536 of them.

    Arguments in the job:
        x, n: address of n elements.
        table: address of uint32 (65536,): the bits of f(x), above them the code.
        result: address of n elements.
        bits: number of bits in a code.
        packed: address of the packed bytes.
    """

    def look_up(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, n = words[1], words[2], words[3], words[4]
        table_at, result, bits, packed = words[5], words[6], words[7], words[8]
        source = _vector(x, np.uint16(0), n)
        table = _vector(table_at, np.uint32(0), 1 << 16)
        y = _vector(result, np.uint16(0), n)
        target = _vector(packed, np.uint8(0), (n + GROUP - 1) // GROUP * bits)
        entries = np.empty(BLOCK, np.uint32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        while True:
            part_number = _take(job)  # pyright: ignore[reportCallIssue]
            if part_number >= parts:
                return
            for block in range(blocks * part_number // parts, blocks * (part_number + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                xs = source[block * BLOCK : block * BLOCK + count]
                ys = y[block * BLOCK : block * BLOCK + count]
                for j in range(count):
                    entries[j] = table[xs[j]]
                for j in range(count):
                    ys[j] = np.uint16(entries[j])
                for j in range(count):
                    small[j] = np.uint8(entries[j] >> np.uint32(16))
                _pack(small, count, bits, staged, target, block)

    return compile_kernel(look_up)


@cache
def multiply_kernel(name: str, selects: bool) -> Kernel:
    """Return the kernel that multiplies a gradient of a float format by levels.

    With `selects`, a level of 0 gives 0 for any gradient; else ∞·0 is NaN.

    Arguments in the job:
        grad, n: address of n elements.
        packed: address of the packed codes.
        bits: number of bits in a code.
        levels: address of (2^bits,) in the type of arithmetic, padded with 0: any code may be looked up.
        result: address of n elements.
    """
    zero = FORMATS[name].stored(0)
    nothing = np.float64(0) if name == "float64" else np.float32(0)

    def multiply(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, grad, n = words[1], words[2], words[3], words[4]
        packed, bits, levels_at, result = words[5], words[6], words[7], words[8]
        source = _vector(grad, zero, n)
        target = _vector(result, zero, n)
        codes = _vector(packed, np.uint8(0), (n + GROUP - 1) // GROUP * bits)
        levels = _vector(levels_at, nothing, 1 << bits)
        mask = np.uint64((1 << bits) - 1)
        b = np.uint64(bits)
        factors = np.empty(BLOCK, levels.dtype)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        stage = staged.ctypes.data
        while True:
            part_number = _take(job)  # pyright: ignore[reportCallIssue]
            if part_number >= parts:
                return
            for block in range(blocks * part_number // parts, blocks * (part_number + 1) // parts):
                count = min(BLOCK, n - block * BLOCK)
                base = block * (BLOCK // GROUP) * bits
                groups = (count + GROUP - 1) // GROUP
                for i in range(groups * bits):  # a slice takes far longer
                    staged[i] = codes[base + i]
                for g in range(groups):
                    w = _load_word(stage + g * bits)  # pyright: ignore[reportCallIssue]
                    first = np.uint64(g * GROUP)  # unsigned, so that the index cannot be negative
                    for j in range(GROUP):
                        factors[first + np.uint64(j)] = levels[w & mask]
                        w >>= b
                x = source[block * BLOCK : block * BLOCK + count]
                y = target[block * BLOCK : block * BLOCK + count]
                for j in range(count):
                    y[j] = _narrow(_widen(x[j], name) * factors[j], name)  # pyright: ignore[reportCallIssue]
                if selects:  # in a loop of its own: a select in the loop above makes it twice as slow in memory
                    for j in range(count):
                        if factors[j] == nothing:
                            y[j] = zero

    return compile_kernel(multiply)
