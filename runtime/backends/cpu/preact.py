"""Fused CPU kernels of a pre-activation layer: one pass through memory each, packing and reading codes on the way.

    encode                   A₂ → its packed code, and A₂ becomes A₃ in place               (forward)
    decode                   packed code → Ã₃                                                (for the weights' gradient)
    through_normalization    Σ ∇A₂ and Σ Ã₁∘∇A₂ of each channel, from the code and ∇A₃; then ∇A₃ becomes the gradient
                             of the layer's input in place                                (equations 6 to 8)

Codes and their parameters are `FixedPoint`'s. Plain torch in layers/preact/function.py is the oracle of these kernels.

A layer of a deep network may be small, so the cost per call matters: allocating a tensor or an operation of torch takes
a microsecond or more. So a kernel takes γ and β directly, and each of its threads computes the parameters of each
channel's codes itself.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.packing import packed_size
from ...tensors.spec import channel_run
from ...tensors.traits import KINDS, largest, smallest
from ..reference import preact as reference
from .numba_tools import BLOCK, GROUP, as_float, build, read, read_codes, take, vector, write, write_codes
from .preact_parameters import F32, I32, LEAST_RUN, code_rows, columns_of, normal_rows, spread
from .threads import JOB_WORDS, Kernel, run

# Each share of the blocks has sums of its own, added in a fixed order: the same bits on any number of threads.
_SHARES, _BLOCKS_PER_SHARE = 32, 64


def encode(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> Tensor:
    """Return the packed code of the dense tensor `A` (N, C, …), and turn `A` into its (leaky) ReLU, in place.

    Plain torch serves where a γ is 0, and `A` does not determine the normalized input, which is coded there.
    """
    if int(γ.count_nonzero()) != γ.numel():
        return reference.encode(A, x, γ, β, mean, inverse_deviation, bits, slope)
    n = A.numel()
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    γ, β = _single(γ), _single(β)
    memory = _memory(A)
    run(_encoder(), -(-n // BLOCK), *memory, γ.data_ptr(), β.data_ptr(), bits, _bits(slope), packed.data_ptr())
    return packed


def decode(packed: Tensor, γ: Tensor, β: Tensor, bits: int, slope: float, out: Tensor) -> None:
    """Write Ã₃, the (leaky) ReLU of the dequantized codes, to the dense tensor `out`."""
    γ, β = _single(γ), _single(β)
    limits = (_bits(smallest(out.dtype)), _bits(largest(out.dtype)))
    run(_decoder(), -(-out.numel() // BLOCK), *_arguments(packed, γ, β, bits, slope, out), *limits)


def through_normalization(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    gradient: Tensor,
    inverse_deviation: Tensor,
    by_batch: bool,
    into_input: bool,
) -> Tensor:
    """Return Σ ∇A₂ and Σ Ã₁∘∇A₂ of each channel, float32 (2, C); if `into_input`, make ∇A₃ the gradient of the input.

    Args:
        packed, γ, β, bits, slope: the codes and their parameters.
        gradient: ∇A₃, dense; overwritten if `into_input`.
        inverse_deviation: (σ² + ε)^{−1/2}, (C,).
        by_batch: whether mean and variance are those of the batch.
        into_input: whether the input needs a gradient.
    """
    γ, β, inverse_deviation = _single(γ), _single(β), _single(inverse_deviation)
    blocks = -(-gradient.numel() // BLOCK)
    shares = max(1, min(_SHARES, blocks // _BLOCKS_PER_SHARE))
    C = gradient.shape[1]
    sums = torch.empty(shares + 1, 2, C, dtype=torch.float32, device="cpu")
    arguments = (*_arguments(packed, γ, β, bits, slope, gradient), sums.data_ptr(), shares)
    run(_summer(), blocks, *arguments)
    run(_normalizer(), blocks if into_input else 0, *arguments, inverse_deviation.data_ptr(), int(by_batch))
    return sums[shares]


def _arguments(packed: Tensor, γ: Tensor, β: Tensor, bits: int, slope: float, values: Tensor) -> tuple[int, ...]:
    return (*_memory(values), γ.data_ptr(), β.data_ptr(), bits, _bits(slope), packed.data_ptr())


def _memory(x: Tensor) -> tuple[int, ...]:
    """Return where a dense tensor (N, C, …) is, the kind of its numbers, how many there are, and their channels."""
    return x.data_ptr(), KINDS[x.dtype], x.numel(), channel_run(x.shape, x.stride(), 1), x.shape[1]


def _single(vector: Tensor) -> Tensor:
    return vector if vector.dtype is torch.float32 and vector.is_contiguous() else vector.float().contiguous()


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


# ---- kernels: the arguments that all share come first ----------------------------------------------------------------
# Memory is viewed by its address: a slice of an array takes as long as a hundred elements.


@njit(inline="always")
def _address(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@cache
def _encoder() -> Kernel:
    def encode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, inner, C = words[1], words[2], words[3], words[4], words[5], words[6], words[7]
        γ, β, bits, leak, packed = words[8], words[9], words[10], as_float(words[11]), words[12]
        columns = columns_of(C, inner)
        run = inner if inner >= LEAST_RUN else 1
        origins, inverses = np.empty(columns, np.float32), np.empty(columns, np.float32)
        zeros = np.empty(columns, np.int32)
        code_rows(γ, β, C, inner, bits, True, origins, inverses, zeros)
        origins_at, inverses_at, zeros_at = _address(origins), _address(inverses), _address(zeros)
        half = np.float32(1 << (bits - 1))
        top = np.float32((1 << bits) - 1)
        nothing = np.float32(0)
        buffer = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.empty(BLOCK + GROUP, np.uint8)
        buffer_at, small_at = _address(buffer), _address(small)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                if kind:
                    read(x, kind, start, count, buffer)
                values_at = buffer_at if kind else x + 4 * start
                position = 0
                c = start // run % columns
                length = min(count, columns - c if run == 1 else run - start % run)
                while position < count:
                    A = vector(values_at + 4 * position, F32, length)
                    codes = vector(small_at + position, np.uint8(0), length)
                    if run == 1:
                        os, ss = vector(origins_at + 4 * c, F32, length), vector(inverses_at + 4 * c, F32, length)
                        zs = vector(zeros_at + 4 * c, I32, length)
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
                    c = 0 if run == 1 or c + 1 == C else c + 1
                    length = min(count - position, columns if run == 1 else run)
                write_codes(small, count, bits, staged, packed, start // GROUP)
                values = vector(values_at, F32, count)
                if leak == nothing:
                    for j in range(count):
                        values[j] = nothing if values[j] < nothing else values[j]  # −0 and NaN stay, as in torch
                else:
                    for j in range(count):
                        values[j] = values[j] if values[j] > nothing else np.float32(values[j] * leak)
                if kind:
                    write(x, kind, start, count, buffer)

    return build(encode)


@cache
def _decoder() -> Kernel:
    def decode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, out, kind, n, inner, C = words[1], words[2], words[3], words[4], words[5], words[6], words[7]
        γ, β, bits, leak, packed = words[8], words[9], words[10], as_float(words[11]), words[12]
        least, most = as_float(words[13]), as_float(words[14])
        columns = columns_of(C, inner)
        run = inner if inner >= LEAST_RUN else 1
        origins, steps = np.empty(columns, np.float32), np.empty(columns, np.float32)
        zeros = np.empty(columns, np.int32)
        code_rows(γ, β, C, inner, bits, False, origins, steps, zeros)
        origins_at, steps_at, zeros_at = _address(origins), _address(steps), _address(zeros)
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        buffer = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        buffer_at, small_at = _address(buffer), _address(small)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                values_at = buffer_at if kind else out + 4 * start
                position = 0
                c = start // run % columns
                length = min(count, columns - c if run == 1 else run - start % run)
                while position < count:
                    codes = vector(small_at + position, np.uint8(0), length)
                    A = vector(values_at + 4 * position, F32, length)
                    if run == 1:
                        os, ss = vector(origins_at + 4 * c, F32, length), vector(steps_at + 4 * c, F32, length)
                        zs = vector(zeros_at + 4 * c, I32, length)
                        for j in range(length):
                            code = np.int32(codes[j])
                            value = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                            positive = code >= zs[j]
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            value = high if value > high else value
                            A[j] = value if positive else np.float32(value * leak)
                    else:
                        o, s, z = origins[c], steps[c], zeros[c]
                        for j in range(length):
                            code = np.int32(codes[j])
                            value = o + np.float32(np.float32(np.float32(code) + middle) * s)
                            positive = code >= z
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            value = high if value > high else value
                            A[j] = value if positive else np.float32(value * leak)
                    position += length
                    c = 0 if run == 1 or c + 1 == C else c + 1
                    length = min(count - position, columns if run == 1 else run)
                if kind:
                    write(out, kind, start, count, buffer)

    return build(decode)


@njit(inline="always")
def _through(gradient: Any, positive: Any, leak: Any) -> Any:
    """Return the gradient of the (leaky) ReLU's input; as in torch, 0 rather than 0·∞ where its slope is 0."""
    below = np.float32(gradient * leak) if leak != np.float32(0) else np.float32(0)
    return gradient if positive else below


@njit(fastmath={"reassoc"}, error_model="numpy")  # so that sums vectorise
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
def _summer() -> Kernel:
    def sums(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, gradient, kind, n = words[1], words[2], words[3], words[4], words[5]
        inner, C, γ, β, bits = words[6], words[7], words[8], words[9], words[10]
        leak, packed = as_float(words[11]), words[12]
        sums_at, shares = words[13], words[14]
        columns = columns_of(C, inner)
        run = inner if inner >= LEAST_RUN else 1
        repeats = 1 if inner >= LEAST_RUN else inner
        offsets, slopes = np.empty(columns, np.float32), np.empty(columns, np.float32)
        zeros = np.empty(columns, np.int32)
        normal_rows(γ, β, C, inner, bits, offsets, slopes, zeros)
        offsets_at, slopes_at, zeros_at = _address(offsets), _address(slopes), _address(zeros)
        plain, weighted = np.empty(columns, np.float32), np.empty(columns, np.float32)
        plain_at, weighted_at = _address(plain), _address(weighted)
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        buffer = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        buffer_at, small_at = _address(buffer), _address(small)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for share in range(shares * part // parts, shares * (part + 1) // parts):
                for column in range(columns):
                    plain[column] = weighted[column] = np.float32(0)
                for block in range(blocks * share // shares, blocks * (share + 1) // shares):
                    start = block * BLOCK
                    count = min(BLOCK, n - start)
                    if kind:
                        read(gradient, kind, start, count, buffer)
                    values_at = buffer_at if kind else gradient + 4 * start
                    read_codes(packed, start // GROUP, count, bits, staged, small)
                    position = 0
                    c = start // run % columns
                    length = min(count, columns - c if run == 1 else run - start % run)
                    while position < count:
                        codes = vector(small_at + position, np.uint8(0), length)
                        g = vector(values_at + 4 * position, F32, length)
                        if run == 1:
                            os, ss = vector(offsets_at + 4 * c, F32, length), vector(slopes_at + 4 * c, F32, length)
                            zs = vector(zeros_at + 4 * c, I32, length)
                            some, more = vector(plain_at + 4 * c, F32, length), vector(weighted_at + 4 * c, F32, length)
                            for j in range(length):
                                code = np.int32(codes[j])
                                normal = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                                h = _through(g[j], code >= zs[j], leak)
                                some[j] += h
                                more[j] += np.float32(h * normal)
                        else:
                            a, b = _two_sums(g, codes, zeros[c], leak, middle)
                            plain[c] += a
                            weighted[c] += np.float32(offsets[c] * a) + np.float32(slopes[c] * b)
                        position += length
                        c = 0 if run == 1 or c + 1 == C else c + 1
                        length = min(count - position, columns if run == 1 else run)
                totals = vector(sums_at + 4 * share * 2 * C, F32, 2 * C)
                for c in range(C):
                    a = b = np.float64(0)
                    for first in range(c * repeats, columns, C * repeats):
                        for column in range(first, first + repeats):
                            a += np.float64(plain[column])
                            b += np.float64(weighted[column])
                    totals[c], totals[C + c] = np.float32(a), np.float32(b)

    return build(sums)


@cache
def _normalizer() -> Kernel:
    def normalize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, gradient, kind, n = words[1], words[2], words[3], words[4], words[5]
        inner, C, γ, β, bits = words[6], words[7], words[8], words[9], words[10]
        leak, packed = as_float(words[11]), words[12]
        sums_at, shares, deviations_at, by_batch = words[13], words[14], words[15], words[16]
        columns = columns_of(C, inner)
        run = inner if inner >= LEAST_RUN else 1
        offsets, slopes = np.empty(columns, np.float32), np.empty(columns, np.float32)
        zeros = np.empty(columns, np.int32)
        normal_rows(γ, β, C, inner, bits, offsets, slopes, zeros)
        # The sums of all shares, which every thread adds itself; the input's gradient is s∘(∇A₂ − p − q∘Ã₁).
        s, p, q = np.empty(columns, np.float32), np.empty(columns, np.float32), np.empty(columns, np.float32)
        sums = vector(sums_at, F32, (shares + 1) * 2 * C)
        scales, deviations = vector(γ, F32, C), vector(deviations_at, F32, C)
        first = take(job)  # pyright: ignore[reportCallIssue]
        elements = np.float64(n // C if by_batch else 1)
        for c in range(C):
            a = b = np.float64(0)
            for share in range(shares):
                a += np.float64(sums[share * 2 * C + c])
                b += np.float64(sums[share * 2 * C + C + c])
            s[c] = np.float32(np.float64(scales[c]) * np.float64(deviations[c]))
            p[c] = np.float32(a / elements) if by_batch else np.float32(0)
            q[c] = np.float32(b / elements) if by_batch else np.float32(0)
            if first == 0:
                sums[shares * 2 * C + c], sums[shares * 2 * C + C + c] = np.float32(a), np.float32(b)
        spread(s, C, inner, columns)
        spread(p, C, inner, columns)
        spread(q, C, inner, columns)
        offsets_at, slopes_at, zeros_at = _address(offsets), _address(slopes), _address(zeros)
        s_at, p_at, q_at = _address(s), _address(p), _address(q)
        middle = np.float32(0.5) - np.float32(1 << (bits - 1))
        buffer = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        buffer_at, small_at = _address(buffer), _address(small)
        part = first
        while part < parts:
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                if kind:
                    read(gradient, kind, start, count, buffer)
                values_at = buffer_at if kind else gradient + 4 * start
                read_codes(packed, start // GROUP, count, bits, staged, small)
                position = 0
                c = start // run % columns
                length = min(count, columns - c if run == 1 else run - start % run)
                while position < count:
                    codes = vector(small_at + position, np.uint8(0), length)
                    g = vector(values_at + 4 * position, F32, length)
                    if run == 1:
                        os, us = vector(offsets_at + 4 * c, F32, length), vector(slopes_at + 4 * c, F32, length)
                        zs, ss = vector(zeros_at + 4 * c, I32, length), vector(s_at + 4 * c, F32, length)
                        ps, qs = vector(p_at + 4 * c, F32, length), vector(q_at + 4 * c, F32, length)
                        for j in range(length):
                            code = np.int32(codes[j])
                            normal = os[j] + np.float32(np.float32(np.float32(code) + middle) * us[j])
                            h = _through(g[j], code >= zs[j], leak)
                            g[j] = np.float32(np.float32(np.float32(h - ps[j]) - np.float32(qs[j] * normal)) * ss[j])
                    else:
                        o, u, z, s_c, p_c, q_c = offsets[c], slopes[c], zeros[c], s[c], p[c], q[c]
                        for j in range(length):
                            code = np.int32(codes[j])
                            normal = o + np.float32(np.float32(np.float32(code) + middle) * u)
                            h = _through(g[j], code >= z, leak)
                            g[j] = np.float32(np.float32(np.float32(h - p_c) - np.float32(q_c * normal)) * s_c)
                    position += length
                    c = 0 if run == 1 or c + 1 == C else c + 1
                    length = min(count - position, columns if run == 1 else run)
                if kind:
                    write(gradient, kind, start, count, buffer)
            part = take(job)  # pyright: ignore[reportCallIssue]

    return build(normalize)
