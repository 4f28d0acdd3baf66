"""Outlier quantization on the CPU: the kernels that make numbers of codes, and mask a gradient by them."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

from ...tensors.traits import largest, smallest
from ..reference.outlier import POSITION_BLOCK
from . import outlier_state
from .numba_tools import GROUP, build, prefetch_to_read, prefetch_to_write, read, read_codes, take, vector, write
from .outlier_state import SPAN
from .threads import JOB_WORDS, Kernel

_SINGLE_LARGEST, _SINGLE_SMALLEST = np.float32(largest(torch.float32)), np.float32(smallest(torch.float32))
_HALF_LARGEST, _BRAIN_LARGEST = (np.float32(largest(d)) for d in (torch.float16, torch.bfloat16))
_HALF_SMALLEST = np.float32(smallest(torch.float16))  # of the two others it is the same


@cache
def dequantizer() -> Kernel:
    """Return the kernel that writes the numbers of codes, and the outliers."""

    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, n, bits = words[1], words[2], words[3], words[4], words[5]
        line = vector(words[6], np.float32(0), 2)
        least, step = line[0], line[1]
        relu = words[7] != 0
        length = (n + POSITION_BLOCK - 1) // POSITION_BLOCK
        counts = vector(words[8], np.uint8(0), length)
        total = words[11]
        offsets = vector(words[9], np.uint8(0), total)
        outliers, value_kind, out, kind = words[10], words[12], words[13], words[14]
        most = _SINGLE_LARGEST if kind == 0 else _HALF_LARGEST if kind == 1 else _BRAIN_LARGEST
        fewest = (_HALF_SMALLEST if kind == 1 else _SINGLE_SMALLEST) if relu else -most
        zero = np.float32(0) * step
        first = np.float32(1 if relu else 0)
        buffer = np.empty(SPAN, np.float32)
        large = np.empty(POSITION_BLOCK, np.float32)
        small = np.empty(SPAN, np.uint8)
        staged = np.zeros(SPAN + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            begin = blocks * part // parts
            at = 0
            for i in range(4 * begin):
                at += np.int64(counts[i])
            at = min(at, total)
            for block in range(begin, blocks * (part + 1) // parts):
                start = block * SPAN
                count = min(SPAN, n - start)
                values = vector(out + start * 4, np.float32(0), count)
                if kind:
                    values = buffer
                else:
                    prefetch_to_write(out + (start + count) * 4, min(count, n - start - count) * 4)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                if relu:
                    for j in range(count):
                        code = np.float32(small[j])
                        y = least + (code - first) * step
                        y = most if y > most else y
                        y = fewest if y < fewest else y
                        values[j] = zero if code == np.float32(0) else y
                else:
                    for j in range(count):
                        y = least + (np.float32(small[j]) - first) * step
                        y = most if y > most else y
                        values[j] = fewest if y < fewest else y
                for i in range(4 * block, min(4 * block + 4, length)):
                    # In bounds whatever the parts hold: they may have changed since they were checked.
                    many = min(np.int64(counts[i]), min(np.int64(POSITION_BLOCK), total - at))
                    read(outliers, value_kind, at, many, large)
                    base = i * POSITION_BLOCK - start
                    last = min(np.int64(POSITION_BLOCK), count - base) - 1
                    for j in range(many):
                        values[base + min(np.int64(offsets[at + j]), last)] = large[j]
                    at += many
                if kind:
                    write(out, kind, start, count, values)

    return build(dequantize, outlier_state)


@cache
def masker() -> Kernel:
    """Return the kernel that sets a gradient to 0 where codes are 0."""

    def mask(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, n, bits = words[1], words[2], words[3], words[4], words[5]
        grad, out, size = words[6], words[7], words[8]
        small = np.empty(SPAN, np.uint8)
        staged = np.zeros(SPAN + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * SPAN
                count = min(SPAN, n - start)
                ahead = min(count, n - start - count) * size
                prefetch_to_read(grad + (start + count) * size, ahead)
                prefetch_to_write(out + (start + count) * size, ahead)
                read_codes(packed, start // GROUP, count, bits, staged, small)
                if size == 2:
                    _mask(grad + start * 2, out + start * 2, np.uint16(0), small, count)
                elif size == 4:
                    _mask(grad + start * 4, out + start * 4, np.uint32(0), small, count)
                else:
                    _mask(grad + start * 8, out + start * 8, np.uint64(0), small, count)

    return build(mask, outlier_state)


@njit(inline="always")
def _mask(grad: Any, out: Any, zero: Any, small: Any, count: Any) -> None:
    """Write the numbers at the address `grad`, or `zero` where their codes are 0, to the address `out`."""
    source, target = vector(grad, zero, count), vector(out, zero, count)  # pyright: ignore[reportCallIssue]
    for j in range(count):
        target[j] = source[j] if small[j] else zero
