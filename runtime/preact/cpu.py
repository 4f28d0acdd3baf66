"""The fused CPU kernels of a pre-activation layer: one walk through memory each, codes packed and read on the way.

    encode       A₂ → its packed code, and A₂ becomes A₃ where it lies          (forward)
    decode       packed code → Ã₃                                                (for the weights' gradient)
    sums         Σ ∇A₂ and Σ Ã₁∘∇A₂ of each channel, from the code and ∇A₃       (equations 6 and 7)
    normalise    ∇A₃ becomes the gradient of the layer's input where it lies     (equations 6 to 8)

The codes and their meaning are `FixedPoint`'s. What plain torch does in `backward.py` is the oracle of these kernels.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ..backends.team import JOB_WORDS, Kernel, run
from ..packing import packed_size
from ..quantizers.common import BLOCK, KINDS, largest, smallest
from ..quantizers.cpu.pieces import GROUP, as_float, build, read, read_codes, take, vector, write, write_codes
from ..quantizers.fixed_point import LEAST_STEP, MOST_STEP

if TYPE_CHECKING:
    from .meaning import Meaning

# Rows of the table that tells what codes mean; see meaning.py.
ORIGIN, STEP, INVERSE, ZERO, OFFSET, SLOPE = range(6)

# Each share of the blocks has sums of its own, which are added in one order: the same bits on any number of threads.
_SHARES, _BLOCKS_PER_SHARE = 32, 64


def table(γ: Tensor, β: Tensor, bits: int, repeats: int = 1, times: int = 1) -> Tensor:
    """Return the table of `Meaning`, float32 (6, times·C·repeats), for γ and β, float32 (C,), contiguous."""
    C = γ.numel()
    rows = torch.empty(6, times * C * repeats, dtype=torch.float32, device="cpu")
    run(_table_maker(), 1, γ.data_ptr(), β.data_ptr(), C, bits, rows.data_ptr(), repeats, times)
    return rows


def encode(A: Tensor, meaning: "Meaning", slope: float) -> Tensor:
    """Return the packed code of the dense tensor `A`, and turn `A` into its (leaky) ReLU, in place."""
    n, m = A.numel(), meaning
    packed = torch.empty(packed_size(n, m.bits), dtype=torch.uint8, device="cpu")
    arguments = (A.data_ptr(), KINDS[A.dtype], n, m.run, m.table.shape[1], m.table.data_ptr(), m.bits, _bits(slope))
    run(_encoder(), -(-n // BLOCK), *arguments, packed.data_ptr())
    return packed


def decode(packed: Tensor, meaning: "Meaning", slope: float, out: Tensor) -> None:
    """Write Ã₃, the (leaky) ReLU of what the codes mean, to the dense tensor `out`."""
    limits = (_bits(smallest(out.dtype)), _bits(largest(out.dtype)))
    run(_decoder(), -(-out.numel() // BLOCK), *_arguments(packed, meaning, slope, out), *limits)


def sums(packed: Tensor, meaning: "Meaning", slope: float, gradient: Tensor) -> Tensor:
    """Return Σ ∇A₂ and Σ Ã₁∘∇A₂ of each channel, float64 (2, C), from ∇A₃, dense."""
    blocks = -(-gradient.numel() // BLOCK)
    shares = max(1, min(_SHARES, blocks // _BLOCKS_PER_SHARE))
    partial = torch.zeros(shares, 2, meaning.table.shape[1], device="cpu")
    run(_summer(), blocks, *_arguments(packed, meaning, slope, gradient), partial.data_ptr(), shares)
    return meaning.by_channel(partial.sum(0, dtype=torch.float64))


def normalise(packed: Tensor, meaning: "Meaning", slope: float, gradient: Tensor, factors: Tensor) -> None:
    """Turn ∇A₃, dense, into s·(∇A₂ − p − q·Ã₁), in place.

    Args:
        packed, meaning, slope: of the code.
        gradient: ∇A₃.
        factors: s, p and q for each column of the meaning's table, float32.
    """
    blocks = -(-gradient.numel() // BLOCK)
    run(_normaliser(), blocks, *_arguments(packed, meaning, slope, gradient), factors.data_ptr())


def _arguments(packed: Tensor, m: "Meaning", slope: float, values: Tensor) -> tuple[int, ...]:
    memory = (packed.data_ptr(), values.data_ptr(), KINDS[values.dtype], values.numel())
    return (*memory, m.run, m.table.shape[1], m.table.data_ptr(), m.bits, _bits(slope))


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@njit(inline="always")
def _through(gradient: Any, positive: Any, leak: Any) -> Any:
    """Return the gradient behind the (leaky) ReLU: as in torch, 0 and not 0·∞ where there is none."""
    below = np.float32(gradient * leak) if leak != np.float32(0) else np.float32(0)
    return gradient if positive else below


@njit(fastmath={"reassoc"}, error_model="numpy")  # so that many elements are added at once
def _two_sums(gradient: Any, codes: Any, zero: Any, leak: Any, middle: Any) -> Any:
    """Return Σ ∇A₂ and Σ (code + ½ − 2^{K−1})∘∇A₂ of a run of one channel."""
    a = b = np.float32(0)
    for j in range(len(codes)):
        code = np.int32(codes[j])
        h = _through(gradient[j], code >= zero, leak)
        a += h
        b += np.float32(h * np.float32(np.float32(code) + middle))
    return a, b


@cache
def _encoder() -> Kernel:
    def encode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, inner, C = words[1], words[2], words[3], words[4], words[5], words[6], words[7]
        origins = vector(words[8] + 4 * C * ORIGIN, np.float32(0), C)
        inverses = vector(words[8] + 4 * C * INVERSE, np.float32(0), C)
        zeros = vector(words[8] + 4 * C * ZERO, np.int32(0), C)
        bits, leak, packed = words[9], as_float(words[10]), words[11]
        half = np.float32(1 << (bits - 1))
        top = np.float32((1 << bits) - 1)
        nothing = np.float32(0)
        values = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                read(x, kind, start, count, values)
                position = 0
                c = start // inner % C
                length = min(count, C - c if inner == 1 else inner - start % inner)
                while position < count:
                    A = values[position : position + length]
                    codes = small[position : position + length]
                    if inner == 1:
                        os, ss, zs = origins[c : c + length], inverses[c : c + length], zeros[c : c + length]
                        for j in range(length):
                            y = np.float32(np.float32(A[j] - os[j]) * ss[j]) + half
                            y = y if y > nothing else nothing
                            code = np.int32(y if y < top else top)
                            codes[j] = np.uint8(max(code, zs[j]) if A[j] > nothing else min(code, np.int32(zs[j] - 1)))
                    else:
                        o, s, z = origins[c], inverses[c], zeros[c]
                        below = np.int32(z - 1)
                        for j in range(length):
                            y = np.float32(np.float32(A[j] - o) * s) + half
                            y = y if y > nothing else nothing
                            code = np.int32(y if y < top else top)
                            codes[j] = np.uint8(max(code, z) if A[j] > nothing else min(code, below))
                    position += length
                    c = 0 if inner == 1 or c + 1 == C else c + 1
                    length = min(count - position, C if inner == 1 else inner)
                write_codes(small, count, bits, staged, packed, start // GROUP)
                if leak == nothing:
                    for j in range(count):
                        values[j] = nothing if values[j] < nothing else values[j]  # −0 and NaN stay, as in torch
                else:
                    for j in range(count):
                        values[j] = values[j] if values[j] > nothing else np.float32(values[j] * leak)
                write(x, kind, start, count, values)

    return build(encode)


@cache
def _decoder() -> Kernel:
    def decode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, out, kind = words[1], words[2], words[3], words[4], words[5]
        n, inner, C = words[6], words[7], words[8]
        origins = vector(words[9] + 4 * C * ORIGIN, np.float32(0), C)
        steps = vector(words[9] + 4 * C * STEP, np.float32(0), C)
        zeros = vector(words[9] + 4 * C * ZERO, np.int32(0), C)
        bits, leak = words[10], as_float(words[11])
        least, most = as_float(words[12]), as_float(words[13])
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        values = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                position = 0
                c = start // inner % C
                length = min(count, C - c if inner == 1 else inner - start % inner)
                while position < count:
                    codes = small[position : position + length]
                    here = values[position : position + length]
                    if inner == 1:
                        os, ss, zs = origins[c : c + length], steps[c : c + length], zeros[c : c + length]
                        for j in range(length):
                            code = np.int32(codes[j])
                            value = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                            positive = code >= zs[j]
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            value = high if value > high else value
                            here[j] = value if positive else np.float32(value * leak)
                    else:
                        o, s, z = origins[c], steps[c], zeros[c]
                        for j in range(length):
                            code = np.int32(codes[j])
                            value = o + np.float32(np.float32(np.float32(code) + middle) * s)
                            positive = code >= z
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            value = high if value > high else value
                            here[j] = value if positive else np.float32(value * leak)
                    position += length
                    c = 0 if inner == 1 or c + 1 == C else c + 1
                    length = min(count - position, C if inner == 1 else inner)
                write(out, kind, start, count, values)

    return build(decode)


@cache
def _summer() -> Kernel:
    def sums(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, gradient, kind = words[1], words[2], words[3], words[4], words[5]
        n, inner, C = words[6], words[7], words[8]
        offsets = vector(words[9] + 4 * C * OFFSET, np.float32(0), C)
        slopes = vector(words[9] + 4 * C * SLOPE, np.float32(0), C)
        zeros = vector(words[9] + 4 * C * ZERO, np.int32(0), C)
        bits, leak, partial, shares = words[10], as_float(words[11]), words[12], words[13]
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        totals = vector(partial, np.float32(0), shares * 2 * C)
        values = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for share in range(shares * part // parts, shares * (part + 1) // parts):
                first = share * 2 * C
                for block in range(blocks * share // shares, blocks * (share + 1) // shares):
                    start = block * BLOCK
                    count = min(BLOCK, n - start)
                    read(gradient, kind, start, count, values)
                    read_codes(packed, start // GROUP, count, bits, staged, small)
                    position = 0
                    c = start // inner % C
                    length = min(count, C - c if inner == 1 else inner - start % inner)
                    while position < count:
                        codes = small[position : position + length]
                        g = values[position : position + length]
                        if inner == 1:
                            os, ss, zs = offsets[c : c + length], slopes[c : c + length], zeros[c : c + length]
                            plain = totals[first + c : first + c + length]
                            weighted = totals[first + C + c : first + C + c + length]
                            for j in range(length):
                                code = np.int32(codes[j])
                                normal = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                                h = _through(g[j], code >= zs[j], leak)
                                plain[j] += h
                                weighted[j] += np.float32(h * normal)
                        else:
                            a, b = _two_sums(g, codes, zeros[c], leak, middle)
                            totals[first + c] += a
                            totals[first + C + c] += np.float32(offsets[c] * a) + np.float32(slopes[c] * b)
                        position += length
                        c = 0 if inner == 1 or c + 1 == C else c + 1
                        length = min(count - position, C if inner == 1 else inner)

    return build(sums)


@cache
def _normaliser() -> Kernel:
    def normalise(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, gradient, kind = words[1], words[2], words[3], words[4], words[5]
        n, inner, C = words[6], words[7], words[8]
        offsets = vector(words[9] + 4 * C * OFFSET, np.float32(0), C)
        slopes = vector(words[9] + 4 * C * SLOPE, np.float32(0), C)
        zeros = vector(words[9] + 4 * C * ZERO, np.int32(0), C)
        bits, leak = words[10], as_float(words[11])
        factors = vector(words[12], np.float32(0), 3 * C)
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        values = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                read(gradient, kind, start, count, values)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                position = 0
                c = start // inner % C
                length = min(count, C - c if inner == 1 else inner - start % inner)
                while position < count:
                    codes = small[position : position + length]
                    g = values[position : position + length]
                    if inner == 1:
                        os, ss, zs = offsets[c : c + length], slopes[c : c + length], zeros[c : c + length]
                        fs, ps = factors[c : c + length], factors[C + c : C + c + length]
                        qs = factors[2 * C + c : 2 * C + c + length]
                        for j in range(length):
                            code = np.int32(codes[j])
                            normal = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                            h = _through(g[j], code >= zs[j], leak)
                            g[j] = np.float32(np.float32(np.float32(h - ps[j]) - np.float32(qs[j] * normal)) * fs[j])
                    else:
                        o, s, z = offsets[c], slopes[c], zeros[c]
                        f, p, q = factors[c], factors[C + c], factors[2 * C + c]
                        for j in range(length):
                            code = np.int32(codes[j])
                            normal = o + np.float32(np.float32(np.float32(code) + middle) * s)
                            h = _through(g[j], code >= z, leak)
                            g[j] = np.float32(np.float32(np.float32(h - p) - np.float32(q * normal)) * f)
                    position += length
                    c = 0 if inner == 1 or c + 1 == C else c + 1
                    length = min(count - position, C if inner == 1 else inner)
                write(gradient, kind, start, count, values)

    return build(normalise)


@cache
def _table_maker() -> Kernel:
    """Return the kernel that makes the table of `Meaning`: what `meaning.py` does in torch, in float64 too."""
    limit = largest(torch.float32)

    def tabulate(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, C, bits = words[1], words[5], words[6]
        scales, shifts = vector(words[3], np.float32(0), C), vector(words[4], np.float32(0), C)
        repeats, times = words[8], words[9]
        columns = times * C * repeats
        table = vector(words[7], np.float32(0), 6 * columns)
        zeros = vector(words[7] + 4 * columns * ZERO, np.int32(0), columns)
        half = np.float64(1 << (bits - 1))
        unit = 6.0 / np.float64(1 << bits)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for c in range(C):
                g, b = np.float64(scales[c]), np.float64(shifts[c])
                step = min(6.0 * abs(g) / np.float64(1 << bits), MOST_STEP)
                if np.isnan(g):
                    step = g
                varies = not (step < LEAST_STEP)
                origin = b
                zero = np.float64(1) if b > 0 else 2 * half - 1
                zero = half if b == 0 else zero
                offset = 0.0
                if varies:
                    multiple = np.floor(b / step)
                    if half - multiple > 2 * half - 1:
                        multiple += 1
                    origin = multiple * step
                    zero = half if np.isnan(multiple) else min(max(half - multiple, 1.0), 2 * half - 1)
                    offset = (origin - b) / g
                    offset = 0.0 if np.isnan(offset) else min(max(offset, -2 * unit), 2 * unit)
                if g == 0:
                    zero = 0.0 if b > 0 else 2 * half
                if not np.isnan(origin):
                    origin = min(max(origin, -limit), limit)
                inverse = np.float32(1.0 / step) if varies else np.float32(0)
                for time in range(times):
                    first = (time * C + c) * repeats
                    for at in range(first, first + repeats):
                        table[columns * ORIGIN + at] = np.float32(origin)
                        table[columns * STEP + at] = np.float32(step) if varies else np.float32(0)
                        table[columns * INVERSE + at] = inverse
                        zeros[at] = np.int32(zero)
                        table[columns * OFFSET + at] = np.float32(offset)
                        table[columns * SLOPE + at] = np.float32(-unit if g < 0 else unit)

    return build(tabulate)
