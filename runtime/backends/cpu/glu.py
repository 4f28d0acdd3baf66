"""The gated linear unit on the CPU: torch's own act and product forward, Numba kernels for the saved parts.

The backward pass is one kernel, which reads the gradient and each part once and writes up to three results. Its
arithmetic is the reference's, step by step.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors import host_memory
from ...tensors.glu_parts import GROUP_SIZE
from ...tensors.levels import prepare
from ...tensors.traits import KINDS, as_kind, largest
from ..forwards import forward_of
from ..reference import glu as reference
from ..reference.glu import Parts, joined, nothing, product_over
from . import activation as tables
from . import per_group
from .numba_tools import BLOCK, GROUP, as_float, build, read, read_codes, take, vector, write
from .threads import JOB_WORDS, Kernel, run


def forward(
    gate: Tensor,
    up: Tensor,
    seeds: Sequence[int],
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h and the parts: see `ops`."""
    if table and not derived and gate.is_contiguous():  # one pass for act(gate) and its code, if there is a code
        activated, codes = tables.activation(gate, function, parameters, table)
    else:
        activated = forward_of(function).call(gate, *parameters)
        codes = tables.encode(gate.contiguous(), table) if table else nothing(gate)
    up_copy = copy(up, up_bits, seeds[0])
    second_copy = copy(gate if derived else activated, second_bits, seeds[1])
    h = product_over(activated, up, function)
    return h, codes, up_copy[0], second_copy[0], joined(up_copy[1], second_copy[1])


def copy(x: Tensor, bits: int, seed: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Return the packed codes of the elements of `x` and their groups; both empty for 0 bits."""
    if bits == 0:
        return reference.copy(x, bits, seed, group_size)
    rows = as_kind(x.contiguous().view(1, -1), keep_positive=False)
    packed, minimum, range_ = per_group.quantize(rows, bits, group_size, seed)
    return packed.view(-1), joined(minimum, range_)


def values(packed: Tensor, groups: Tensor, bits: int, n: int, group_size: int = GROUP_SIZE) -> Tensor:
    """Return the `n` values of a copy, float32 (n,)."""
    out = torch.empty(1, n, dtype=torch.float32, device="cpu")
    per_group.dequantize(packed.view(1, -1), groups[:1], groups[1:], bits, group_size, out)
    return out.view(-1)


def backward(
    grad: Tensor,
    parts: Parts,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate, d_up and h, empty if not wanted: see `ops`."""
    if derived or grad.dtype not in KINDS:
        plan = (function, parameters, table, up_bits, second_bits, derived)
        return reference.backward(grad, parts, *plan, wanted, values=values)
    codes, up, second, groups = (part.contiguous() for part in parts)
    results = [host_memory.empty_like(grad) if w else grad.new_empty(0) for w in wanted]
    prepared = prepare(table, grad.dtype, grad.device) if table else None
    levels = np.zeros(1 << prepared.bits, np.float32) if prepared else np.zeros(1, np.float32)
    if prepared:
        levels[: prepared.levels.numel()] = prepared.levels.numpy()
    arguments = np.array(
        [
            *(grad.data_ptr(), KINDS[grad.dtype], grad.numel(), groups.data_ptr(), groups.shape[1]),
            *(codes.data_ptr(), prepared.bits if prepared else 0, levels.ctypes.data),
            *(up.data_ptr(), up_bits, second.data_ptr(), second_bits, groups.shape[0] - 2),
            *(result.data_ptr() if w else 0 for result, w in zip(results, wanted, strict=True)),
            int(np.float32(largest(grad.dtype)).view(np.int32)),
        ],
        np.int64,
    )
    run(_backward(), -(-grad.numel() // BLOCK), arguments.ctypes.data)
    return results[0], results[1], results[2]


_ARGUMENTS = 17  # behind one address, as a list for every call
_FINITE = np.int32(0x7F7FFFFF)  # the bits of the largest float32


@cache
def _backward() -> Kernel:
    def glu_backward(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks = words[1], words[2]
        given = vector(words[3], np.int64(0), _ARGUMENTS)
        grad, kind, n, groups_at, count_of_groups = given[0], given[1], given[2], given[3], given[4]
        codes, code_bits, levels_at = given[5], given[6], given[7]
        up, up_bits, second, second_bits, second_row = given[8], given[9], given[10], given[11], given[12]
        d_gate, d_up, h = given[13], given[14], given[15]
        most = as_float(given[16])
        groups = vector(groups_at, np.uint16(0), 4 * count_of_groups)
        levels = vector(levels_at, np.float32(0), 1 << code_bits)
        dy = np.empty(BLOCK, np.float32)
        of_up = np.empty(BLOCK, np.float32)
        of_second = np.empty(BLOCK, np.float32)
        result = np.empty(BLOCK, np.float32)
        small = np.empty(BLOCK, np.uint8)
        staged = np.zeros(BLOCK + GROUP, np.uint8)
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                at = block * BLOCK
                count = min(BLOCK, n - at)
                if d_gate or d_up:
                    read(grad, kind, at, count, dy)
                if up_bits:
                    read_codes(up, at // GROUP, count, up_bits, staged, small)
                    _values(small, at, count, up_bits, groups, np.int64(0), count_of_groups, of_up)
                if second_bits:
                    read_codes(second, at // GROUP, count, second_bits, staged, small)
                    _values(small, at, count, second_bits, groups, second_row, count_of_groups, of_second)
                if d_gate:
                    read_codes(codes, at // GROUP, count, code_bits, staged, small)
                    for j in range(count):
                        level = levels[small[j]]
                        value = np.float32(np.float32(dy[j] * of_up[j]) * level)
                        result[j] = np.float32(0) if level == np.float32(0) else value
                    write(d_gate, kind, at, count, result)
                if d_up:
                    for j in range(count):
                        result[j] = np.float32(dy[j] * of_second[j])
                    write(d_up, kind, at, count, result)
                if h:
                    for j in range(count):
                        value = np.float32(of_second[j] * of_up[j])
                        value = most if value > most else value
                        result[j] = -most if value < -most else value
                    write(h, kind, at, count, result)

    return build(glu_backward)


@njit(inline="always")
def _values(codes: Any, at: Any, count: Any, bits: Any, groups: Any, row: Any, width: Any, to: Any) -> None:
    """Dequantize `count` codes, from element `at` on, to float32: `dequantize` of the reference."""
    top = np.float32((1 << bits) - 1)
    limit = as_float(_FINITE)
    patterns = to.view(np.int32)
    position = 0
    while position < count:
        group = (at + position) // GROUP_SIZE
        stop = min((group + 1) * GROUP_SIZE - at, count)
        z, r = np.int32(groups[row * width + group]), np.int32(groups[(row + 1) * width + group])
        here = codes[position:stop]
        if r >= 0x8000:
            pattern = np.int32(z << 16 | np.int32(here[0]) << 15 | r & 0x7FFF)
            for j in range(position, stop):
                patterns[j] = pattern
        else:
            Z = as_float(z << 16)
            step = np.float32(as_float(r << 16) / top)
            shown = to[position:stop]
            for j in range(stop - position):
                value = np.float32(Z + np.float32(np.float32(here[j]) * step))
                value = limit if value > limit else value
                shown[j] = -limit if value < -limit else value
        position = stop
