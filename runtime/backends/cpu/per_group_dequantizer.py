"""The kernel that makes numbers of groups' codes."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

from .numba_tools import (
    GROUP,
    as_float,
    build,
    prefetch_to_write,
    read_codes,
    scratch,
    take,
    vector,
    write,
)
from .per_group_quantizer import BLOCK, HALF, QUARTER, STAGE, USUAL, bent, line_of
from .threads import JOB_WORDS, Kernel


@cache
def dequantizer() -> Kernel:
    """Return the kernel that makes numbers of codes; its job's words are taken in order below."""

    def dequantize(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, packed, D, G = words[1], words[2], words[3], words[6], words[7]
        stretch, count, fixed = words[8], words[9], words[10]
        limit, out, kind = as_float(words[11]), words[12], words[13]
        groups = (D + G - 1) // G
        width = (D + GROUP - 1) // GROUP
        N = blocks // max(count, 1)
        minima = vector(words[4], np.uint16(0), N * groups)
        ranges = vector(words[5], np.uint16(0), N * groups)
        of_samples = vector(words[14], np.uint8(0), N)
        starts = vector(words[15], np.int64(0), N)
        width_of_lines, shape = words[17], words[18]
        lines = vector(words[16], np.float32(0), 54 * width_of_lines)
        size = 4 if kind == 0 else 2
        ahead = BLOCK * 4 if kind == 0 else BLOCK * 2  # past the last block it is useless but harmless
        single = scratch(BLOCK, np.float32(0))
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(STAGE, np.uint8(0))
        position = scratch(BLOCK, np.float32(0))
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                n = block // count
                start = block % count * stretch
                end = min(start + stretch, D)
                bits = fixed if fixed else np.int64(of_samples[n])
                row = packed + (n * width * fixed if fixed else starts[n])
                curve = lines[(bits * 6 + 1) * width_of_lines :], width_of_lines, shape, position
                top = np.float32((1 << bits) - 1)
                for at in range(start, end, BLOCK):
                    length = min(BLOCK, end - at)
                    to = out + (n * D + at) * size
                    prefetch_to_write(to + length * size, ahead)
                    values = vector(to if kind == 0 else np.int64(single.ctypes.data), np.float32(0), length)
                    group = n * groups + at // G
                    if length == BLOCK and G in (USUAL, HALF, QUARTER):
                        read_codes(row, at // GROUP, BLOCK, bits, staged, small)
                        if G == USUAL:
                            _find_values(small, BLOCK, USUAL, 0, minima, ranges, group, top, limit, curve, values)
                        elif G == HALF:
                            _find_values(small, BLOCK, HALF, 0, minima, ranges, group, top, limit, curve, values)
                        else:
                            _find_values(small, BLOCK, QUARTER, 0, minima, ranges, group, top, limit, curve, values)
                    else:
                        read_codes(row, at // GROUP, length, bits, staged, small)
                        _find_values(small, length, G, at % G, minima, ranges, group, top, limit, curve, values)
                    if kind:
                        write(to, kind, 0, length, single)

    return build(dequantize)


@njit(inline="always")
def _find_values(
    small: Any,
    length: Any,
    G: Any,
    skipped: Any,
    minima: Any,
    ranges: Any,
    group: Any,
    top: Any,
    limit: Any,
    curve: Any,
    values: Any,
) -> None:
    """Write the dequantized codes of `small` to `values`; they begin `skipped` elements into a group.

    `curve` holds the lines for codes of these bits, their width and the shape, and an array to work in.
    """
    lines, width, given, position = curve
    patterns = values.view(np.int32)
    for first in range(-skipped, length, G):
        start = max(first, 0)
        count = G if skipped == 0 and length % G == 0 else min(first + G, length) - start
        z, r = np.int32(minima[group]), np.int32(ranges[group])
        group += 1
        knots, line, r = line_of(r, lines, width, given)  # pyright: ignore[reportCallIssue]
        codes = small[start : start + count]
        if r >= 0x8000:
            shown = patterns[start : start + count]
            pattern = np.int32(z << 16 | np.int32(codes[0]) << 15 | r & 0x7FFF)
            for j in range(count):
                shown[j] = pattern
        else:
            here = values[start : start + count]
            Z = as_float(z << 16)  # pyright: ignore[reportCallIssue]
            step = np.float32(as_float(r << 16) / top)  # pyright: ignore[reportCallIssue]
            if knots == 2:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                for j in range(count):
                    d = np.float32(codes[j])
                    y = np.float32(c0 * d) + bent(d, c1, K1) + bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    here[j] = np.float32(Z + np.float32(y * step))
            elif knots == 4:
                c0, c1, K1, c2, K2 = line[0], line[1], line[2], line[3], line[4]
                c3, K3, c4, K4 = line[5], line[6], line[7], line[8]
                for j in range(count):
                    d = np.float32(codes[j])
                    y = np.float32(c0 * d) + bent(d, c1, K1) + bent(d, c2, K2)  # pyright: ignore[reportCallIssue]
                    y = y + bent(d, c3, K3) + bent(d, c4, K4)  # pyright: ignore[reportCallIssue]
                    here[j] = np.float32(Z + np.float32(y * step))
            elif knots:  # of tables
                for j in range(count):
                    position[j] = np.float32(line[0] * np.float32(codes[j]))
                for k in range(knots):
                    c1, K1 = line[1 + 2 * k], line[2 + 2 * k]
                    for j in range(count):
                        position[j] += bent(np.float32(codes[j]), c1, K1)  # pyright: ignore[reportCallIssue]
                for j in range(count):
                    here[j] = np.float32(Z + np.float32(position[j] * step))
            else:
                for j in range(count):
                    here[j] = np.float32(Z + np.float32(np.float32(codes[j]) * step))
            _cut(here, count, Z, as_float(r << 16), limit)  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def _cut(values: Any, count: Any, Z: Any, R: Any, limit: Any) -> None:
    """Cut the values of a group to `limit`, the greatest finite number of its dtype, unless all are well within."""
    if not np.float32(abs(Z) + R) < np.float32(limit * np.float32(0.5)):
        for j in range(count):
            value = limit if values[j] > limit else values[j]
            values[j] = -limit if value < -limit else value
