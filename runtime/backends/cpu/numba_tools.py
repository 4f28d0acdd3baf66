"""Building blocks of the quantizers' kernels: reading and writing numbers, packing and unpacking codes, random bits."""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from ...tensors import philox, rotation, traits
from ...tensors.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from . import activation_kernels, vector_code, vectors
from .activation_kernels import GROUP, _load_word, _narrow, _pack, _store_word, _take, _vector, _widen
from .compilation import compile_kernel
from .threads import Kernel

# Private names in activation_kernels.py: parts of kernels, not of the package's interface.
load_word, store_word, take, vector = _load_word, _store_word, _take, _vector

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in KEY_STEPS)
_MASK = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)


def build(body: Callable[[Any], None], *parts: ModuleType) -> Kernel:
    """Compile a kernel, or load it from Numba's disk cache, where its key includes the digest of these building blocks.

    Numba itself checks only whether the file of the kernel has changed, not the files it imports from: `parts` are
    those that only this kernel is made of.
    """
    body.__qualname__ += f"-{_digest(*parts)}"
    return compile_kernel(body)


@cache
def _digest(*own: ModuleType) -> str:
    parts = (activation_kernels, philox, rotation, traits, vector_code, vectors, *own)
    files = (__file__, *(str(part.__file__) for part in parts))
    return sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:8]


@intrinsic(prefer_literal=True)
def _reserve(typingctx: Any, count: Any, like: Any) -> Any:
    """Reserve aligned memory on the stack for a constant number of elements; return its address."""
    n = count.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(context.get_value_type(like), n))
            memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.intp(count, like), generate


@njit(inline="always")
def scratch(count: Any, like: Any) -> Any:
    """Return an array of a constant number of elements of the type of `like`, valid until the kernel returns.

    It is on the stack, so at most some kilobytes. NumPy's arrays count their references, in atomic instructions around
    every function of a kernel that receives one, and each of these waits for memory.
    """
    return vector(_reserve(count, like), like, count)  # pyright: ignore[reportCallIssue]


@intrinsic(prefer_literal=True)
def _prefetch(typingctx: Any, address: Any, purpose: Any) -> Any:
    """Prefetch the cache line at an address, to "read" or "write" it, without waiting."""
    writes = int(purpose.literal_value == "write")

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", (pointer,), ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        )
        builder.call(function, [builder.inttoptr(args[0], pointer), word(writes), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.intp, purpose), generate


# Prefetching the next block while computing with this one takes a tenth to a fifth less time.


@njit(inline="always")
def prefetch_to_read(start: Any, size: Any) -> Any:
    """Prefetch `size` bytes from the address `start` on, to be read."""
    for line in range(0, size, 64):
        _prefetch(start + line, "read")  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def prefetch_to_write(start: Any, size: Any) -> Any:
    """Prefetch `size` bytes from the address `start` on, to be written."""
    for line in range(0, size, 64):
        _prefetch(start + line, "write")  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def as_float(pattern: Any) -> Any:
    """Return the float32 number with the given 32 bits."""
    return np.int32(pattern).view(np.float32)


@njit(inline="always")
def as_bits(value: Any) -> Any:
    """Return the 32 bits of a float32 number."""
    return np.float32(value).view(np.int32)


@njit(inline="always")
def read(x: Any, kind: Any, start: Any, count: Any, to: Any) -> None:
    """Read `count` numbers of a kind (traits.KINDS) from element `start` after the address `x`, as float32."""
    if kind == 0:
        singles = vector(x + start * 4, np.float32(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            to[j] = singles[j]
    elif kind == 1:
        halves = vector(x + start * 2, np.uint16(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            to[j] = _widen(halves[j], "float16")  # pyright: ignore[reportCallIssue]
    else:
        halves = vector(x + start * 2, np.uint16(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            to[j] = _widen(halves[j], "bfloat16")  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def write(x: Any, kind: Any, start: Any, count: Any, values: Any) -> None:
    """Write `count` float32 numbers as numbers of a kind from element `start` after the address `x` on."""
    if kind == 0:
        singles = vector(x + start * 4, np.float32(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            singles[j] = values[j]
    elif kind == 1:
        halves = vector(x + start * 2, np.uint16(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            halves[j] = _narrow(values[j], "float16")  # pyright: ignore[reportCallIssue]
    else:
        halves = vector(x + start * 2, np.uint16(0), count)  # pyright: ignore[reportCallIssue]
        for j in range(count):
            halves[j] = _narrow(values[j], "bfloat16")  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def write_codes(small: Any, count: Any, bits: Any, staged: Any, packed: Any, group: Any) -> None:
    """Pack `count` codes, a byte each, into the groups from `group` on; `staged` is scratch memory."""
    size = (count + GROUP - 1) // GROUP * bits
    target = vector(packed + group * bits, np.uint8(0), size)  # pyright: ignore[reportCallIssue]
    _pack(small, count, bits, staged, target, 0)


@njit(inline="always")
def read_codes(packed: Any, group: Any, count: Any, bits: Any, staged: Any, small: Any) -> None:
    """Unpack `count` codes, and the padding of the last group, from the groups from `group` on: a byte each."""
    groups = (count + GROUP - 1) // GROUP
    start = packed + group * bits
    lanes = vector(np.int64(small.ctypes.data), np.uint64(0), groups)  # pyright: ignore[reportCallIssue]
    if bits == 2:  # as _pack does: constant shifts, and words of 2 and 4 bytes
        pairs = vector(start, np.uint16(0), groups)  # pyright: ignore[reportCallIssue]
        for g in range(groups):
            lanes[g] = _parted(np.uint64(pairs[g]), 2)  # pyright: ignore[reportCallIssue]
    elif bits == 4:
        quads = vector(start, np.uint32(0), groups)  # pyright: ignore[reportCallIssue]
        for g in range(groups):
            lanes[g] = _parted(np.uint64(quads[g]), 4)  # pyright: ignore[reportCallIssue]
    elif bits == 3 and groups % 4 == 0:
        triples = vector(start, np.uint32(0), groups // 4 * 3)  # pyright: ignore[reportCallIssue]
        for i in range(groups // 4):
            u, v, w = np.uint64(triples[3 * i]), np.uint64(triples[3 * i + 1]), np.uint64(triples[3 * i + 2])
            lanes[4 * i] = u & np.uint64(0xFFFFFF)
            lanes[4 * i + 1] = u >> np.uint64(24) | (v & np.uint64(0xFFFF)) << np.uint64(8)
            lanes[4 * i + 2] = v >> np.uint64(16) | (w & np.uint64(0xFF)) << np.uint64(16)
            lanes[4 * i + 3] = w >> np.uint64(8)
        for g in range(groups):
            lanes[g] = _parted(lanes[g], 3)  # pyright: ignore[reportCallIssue]
    else:
        source = vector(start, np.uint8(0), groups * bits)  # pyright: ignore[reportCallIssue]
        for i in range(groups * bits):  # so that words may be read past the last group; a slice takes far longer
            staged[i] = source[i]
        stage = np.int64(staged.ctypes.data)
        for g in range(groups):
            lanes[g] = load_word(stage + g * bits)  # pyright: ignore[reportCallIssue]
        for g in range(groups):
            lanes[g] = _parted(lanes[g], bits)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _parted(w: Any, bits: Any) -> Any:
    """Split a word of 8b bits in three steps into eight bytes: the inverse of packing."""
    b = np.uint64(bits)
    quad = (np.uint64(1) << (np.uint64(4) * b)) - np.uint64(1)
    pair = ((np.uint64(1) << (np.uint64(2) * b)) - np.uint64(1)) * np.uint64(0x0000000100000001)
    single = ((np.uint64(1) << b) - np.uint64(1)) * np.uint64(0x0001000100010001)
    w = (w & quad) | (((w >> (np.uint64(4) * b)) & quad) << np.uint64(32))
    w = (w & pair) | (((w >> (np.uint64(2) * b)) & pair) << np.uint64(16))
    return (w & single) | (((w >> b) & single) << np.uint64(8))


@njit(inline="always")
def random_words(seed: Any, first: Any, count: Any, words: Any) -> None:
    """Write four words of 32 random bits for each of `count` counters from `first` on (philox.py)."""
    for g in range(count):
        counter = np.uint64(first + g)
        c0, c1, c2, c3 = counter, counter >> _HALF_WORD, np.uint64(0), np.uint64(0)
        k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _HALF_WORD
        for _ in range(ROUNDS):
            p0 = (c0 & _MASK) * _M0
            p1 = (c2 & _MASK) * _M1
            c0, c1, c2, c3 = (p1 >> _HALF_WORD) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF_WORD) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        words[4 * g] = np.uint32(c0)
        words[4 * g + 1] = np.uint32(c1)
        words[4 * g + 2] = np.uint32(c2)
        words[4 * g + 3] = np.uint32(c3)


BLOCK = 512  # elements a kernel processes at once
