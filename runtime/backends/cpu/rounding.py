"""Codes of a table of kind `stochastic` on the CPU, with the arithmetic of reference/rounding.py, step by step."""

from functools import cache

import numpy as np
import torch
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors.levels import prepare_rounding
from ...tensors.packing import packed_size
from ...tensors.traits import KINDS
from .numba_tools import BLOCK, GROUP, as_float, build, random_words, read, scratch, take, vector, write_codes
from .threads import JOB_WORDS, Kernel, run

_WORDS = BLOCK // 2  # of 32 random bits
_STAGE = BLOCK + GROUP


def encode_at_random(x: Tensor, table: str, seed: int) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order, rounded at random: uint8 (⌈n/8⌉·bits,)."""
    t = prepare_rounding(table, torch.device("cpu"))
    x = x if x.dtype in KINDS else x.float()
    n = x.numel()
    packed = torch.empty(packed_size(n, t.bits), dtype=torch.uint8, device="cpu")
    ends = (_bits(t.low), _bits(t.high), _bits(t.inverse))
    lines = (t.slope.data_ptr(), t.base.data_ptr(), t.jumps.data_ptr(), t.jumps.numel(), t.slope.numel())
    run(
        *(_encoder(), -(-n // BLOCK), x.data_ptr(), KINDS[x.dtype], n, *ends, *lines),
        *(t.last, t.top, t.bits, seed, packed.data_ptr()),
    )
    return packed


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@cache
def _encoder() -> Kernel:
    def encode(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, blocks, x, kind, n = words[1], words[2], words[3], words[4], words[5]
        low, high, inverse = as_float(words[6]), as_float(words[7]), as_float(words[8])
        lines = words[13]
        slope, base = vector(words[9], np.float32(0), lines), vector(words[10], np.float32(0), lines)
        count_of_jumps = words[12]
        jumps = vector(words[11], np.float32(0), count_of_jumps)
        last, top, bits, seed, packed = words[14], words[15], words[16], words[17], words[18]
        most = np.float32(np.float32(top) * np.float32(65536))
        nothing = np.float32(0)
        single = scratch(BLOCK, np.float32(0))
        inside = scratch(BLOCK, np.float32(0))
        cells = scratch(BLOCK, np.int32(0))
        random = scratch(_WORDS, np.uint32(0))
        dice = random.view(np.uint16)
        small = scratch(BLOCK, np.uint8(0))
        staged = scratch(_STAGE, np.uint8(0))
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                start = block * BLOCK
                count = min(BLOCK, n - start)
                read(x, kind, start, count, single)
                random_words(seed, start // GROUP, (count + GROUP - 1) // GROUP, random)
                for j in range(count):
                    value = single[j] if single[j] == single[j] else nothing
                    value = low if value < low else value
                    value = high if value > high else value
                    inside[j] = value
                    t = np.float32(np.float32(value - low) * inverse)
                    cells[j] = min(np.int32(t), np.int32(last))
                for i in range(count_of_jumps):
                    for j in range(count):
                        cells[j] += np.int32(1) if single[j] > jumps[i] else np.int32(0)
                for j in range(count):
                    cell = cells[j]
                    v = np.float32(np.float32(slope[cell] * inside[j]) + base[cell])
                    u = np.float32(np.float32(v * np.float32(65536)) + np.float32(0.5))
                    u = u if u > nothing else nothing
                    u = u if u < most else most
                    code = np.int32(np.int32(u) + np.int32(dice[j])) >> np.int32(16)
                    code = min(code, np.int32(top))
                    small[j] = np.uint8(code if single[j] == single[j] else top)
                write_codes(small, count, bits, staged, packed, start // GROUP)

    return build(encode)
