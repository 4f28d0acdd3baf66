"""Scales and offsets of a channel's codes: in float64, as `quant_params` and `preact_quant_params` compute them."""

from typing import Any

import numpy as np
import torch
from numba import njit  # pyright: ignore[reportPrivateImportUsage]

from ...tensors.traits import largest
from ..reference.fixed_point import LEAST_STEP, MOST_STEP
from .numba_tools import vector

# Kernels process runs of a channel's elements. Where these are shorter, as in channels-last memory, they repeatedly
# walk through rows of parameters with a column for each element.
LEAST_RUN = 64
LEAST_COLUMNS = 512

_LIMIT = largest(torch.float32)


F32 = np.float32(0)  # for `vector`: the type at an address
I32 = np.int32(0)


@njit(inline="always")
def _channel_params(γ: Any, β: Any, bits: Any) -> Any:
    """Return Δ (0 in a constant channel), o, z, and the offset of Ã₁, float64, of one channel."""
    half = np.float64(1 << (bits - 1))
    g, b = np.float64(γ), np.float64(β)
    step = min(6.0 * abs(g) / np.float64(1 << bits), MOST_STEP)
    step = g if np.isnan(g) else step
    varies = not (step < LEAST_STEP)
    divisor = step if varies else 1.0
    multiple = np.floor(b / divisor)
    multiple += 1.0 if half - multiple > 2 * half - 1 else 0.0
    origin = multiple * divisor
    offset = (origin - b) / (g if varies else 1.0)
    unit = 6.0 / np.float64(1 << bits)
    offset = 0.0 if np.isnan(offset) or not varies else min(max(offset, -2 * unit), 2 * unit)
    zero = half if np.isnan(multiple) else min(max(half - multiple, 1.0), 2 * half - 1)
    constant = 1.0 if b > 0 else (half if b == 0 else 2 * half - 1)
    zero = zero if varies else constant
    zero = (0.0 if b > 0 else 2 * half) if g == 0 else zero
    origin = origin if varies else b
    origin = origin if np.isnan(origin) else min(max(origin, -_LIMIT), _LIMIT)
    return step if varies else 0.0, origin, zero, offset


@njit(inline="always")
def columns_of(C: Any, inner: Any) -> Any:
    """Return the number of columns of a row of parameters, a multiple of those of C channels."""
    if inner >= LEAST_RUN:
        return C
    once = C * inner
    return (LEAST_COLUMNS + once - 1) // once * once


@njit(inline="always")
def spread(row: Any, C: Any, inner: Any, columns: Any) -> None:
    """Repeat each of the first C parameters for its `inner` contiguous elements, and then all of them, in place."""
    if inner >= LEAST_RUN:
        return
    for c in range(C - 1, -1, -1):  # from the end, so that nothing is overwritten before it is read
        value = row[c]
        for i in range(inner):
            row[c * inner + i] = value
    for at in range(C * inner, columns):
        row[at] = row[at - C * inner]


@njit(inline="always")
def code_rows(
    γ: Any, β: Any, C: Any, inner: Any, bits: Any, inverted: Any, origins: Any, steps: Any, zeros: Any
) -> None:
    """Write o, Δ (1/Δ if `inverted`) and z of each column."""
    scales, shifts = vector(γ, F32, C), vector(β, F32, C)
    for c in range(C):
        step, origin, zero, _ = _channel_params(scales[c], shifts[c], bits)
        inverse = 0.0 if step == 0 else 1.0 / step
        origins[c], steps[c], zeros[c] = np.float32(origin), np.float32(inverse if inverted else step), np.int32(zero)
    columns = len(zeros)
    spread(origins, C, inner, columns)
    spread(steps, C, inner, columns)
    spread(zeros, C, inner, columns)


@njit(inline="always")
def normal_rows(γ: Any, β: Any, C: Any, inner: Any, bits: Any, offsets: Any, slopes: Any, zeros: Any) -> None:
    """Write the offset and slope of Ã₁, and z, of each column."""
    scales, shifts = vector(γ, F32, C), vector(β, F32, C)
    unit = np.float32(6.0 / np.float64(1 << bits))
    for c in range(C):
        _, _, zero, offset = _channel_params(scales[c], shifts[c], bits)
        offsets[c], zeros[c] = np.float32(offset), np.int32(zero)
        slopes[c] = -unit if scales[c] < 0 else unit
    columns = len(zeros)
    spread(offsets, C, inner, columns)
    spread(slopes, C, inner, columns)
    spread(zeros, C, inner, columns)
