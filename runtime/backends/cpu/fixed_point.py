"""Fixed-point quantization on the CPU, with the arithmetic of reference/fixed_point.py, step by step.

Where a channel's elements are contiguous, a run is one channel's part of a block; where channels alternate
(channels-last, matrices), it is a run through the channels, and each element has parameters of its own.
"""

from functools import cache

import numpy as np
import torch
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.packing import packed_size
from ...tensors.spec import flat
from ...tensors.traits import KINDS, largest, smallest
from ..reference.fixed_point import quant_params
from .numba_tools import BLOCK, GROUP, as_float, build, read, read_codes, take, vector, write, write_codes
from .threads import JOB_WORDS, Kernel, run


def quantize(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Tensor:
    """Return the packed codes of the dense tensor `x`; element i in memory belongs to channel ⌊i/inner⌋ mod C."""
    n = x.numel()
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    c = quant_params(scale, shift, bits)
    parameters = (inner, c.zero.numel(), c.origin.data_ptr(), c.inverse.data_ptr(), c.zero.data_ptr())
    run(_quantizer(), -(-n // BLOCK), x.data_ptr(), KINDS[x.dtype], n, *parameters, bits, packed.data_ptr())
    return packed


def dequantize(packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, out: Tensor) -> None:
    """Write the dequantized codes to the dense tensor `out`."""
    n = out.numel()
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device="cpu")
        dequantize(packed, scale, shift, inner, bits, single)
        flat(out).copy_(single)
        return
    c = quant_params(scale, shift, bits)
    parameters = (inner, c.zero.numel(), c.origin.data_ptr(), c.step.data_ptr(), c.zero.data_ptr())
    bounds = np.array([smallest(out.dtype), largest(out.dtype)], np.float32).view(np.int32).tolist()
    arguments = (packed.data_ptr(), KINDS[out.dtype], n, *parameters, bits, out.data_ptr(), *bounds)
    run(_dequantizer(), -(-n // BLOCK), *arguments)


@cache
def _quantizer() -> Kernel:
    def quantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n, inner, C = words[1], words[2], words[3], words[4], words[5], words[6], words[7]
        origins = vector(words[8], np.float32(0), C)
        inverses = vector(words[9], np.float32(0), C)
        zeros = vector(words[10], np.int32(0), C)
        bits, packed = words[11], words[12]
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
                while position < count:
                    at = start + position
                    c = at // inner % C
                    run_length = min(count - position, C - c if inner == 1 else inner - at % inner)
                    A = values[position : position + run_length]
                    codes = small[position : position + run_length]
                    if inner == 1:
                        os, ss, zs = (
                            origins[c : c + run_length],
                            inverses[c : c + run_length],
                            zeros[c : c + run_length],
                        )
                        for j in range(run_length):
                            y = np.float32(np.float32(A[j] - os[j]) * ss[j]) + half
                            y = y if y > nothing else nothing
                            code = np.int32(y if y < top else top)
                            zero = zs[j]
                            codes[j] = np.uint8(max(code, zero) if A[j] > nothing else min(code, np.int32(zero - 1)))
                    else:
                        o, s, z = origins[c], inverses[c], zeros[c]
                        below = np.int32(z - 1)
                        for j in range(run_length):
                            y = np.float32(np.float32(A[j] - o) * s) + half
                            y = y if y > nothing else nothing
                            code = np.int32(y if y < top else top)
                            codes[j] = np.uint8(max(code, z) if A[j] > nothing else min(code, below))
                    position += run_length
                write_codes(small, count, bits, staged, packed, start // GROUP)

    return build(quantize)


@cache
def _dequantizer() -> Kernel:
    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, kind, n, inner, C = words[1], words[2], words[3], words[4], words[5], words[6], words[7]
        origins = vector(words[8], np.float32(0), C)
        steps = vector(words[9], np.float32(0), C)
        zeros = vector(words[10], np.int32(0), C)
        bits, out = words[11], words[12]
        least, most = as_float(words[13]), as_float(words[14])
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
                while position < count:
                    at = start + position
                    c = at // inner % C
                    run_length = min(count - position, C - c if inner == 1 else inner - at % inner)
                    codes = small[position : position + run_length]
                    here = values[position : position + run_length]
                    if inner == 1:
                        os, ss, zs = origins[c : c + run_length], steps[c : c + run_length], zeros[c : c + run_length]
                        for j in range(run_length):
                            code = np.int32(codes[j])
                            value = os[j] + np.float32(np.float32(np.float32(code) + middle) * ss[j])
                            positive = code >= zs[j]
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            here[j] = high if value > high else value
                    else:
                        o, s, z = origins[c], steps[c], zeros[c]
                        for j in range(run_length):
                            code = np.int32(codes[j])
                            value = o + np.float32(np.float32(np.float32(code) + middle) * s)
                            positive = code >= z
                            low, high = (least if positive else -most), (most if positive else -least)
                            value = low if value < low else value
                            here[j] = high if value > high else value
                    position += run_length
                write(out, kind, start, count, values)

    return build(dequantize)
