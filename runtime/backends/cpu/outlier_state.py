"""What the four kernels of outlier_quantizer.py share: one record, of which a job has the address."""

import ctypes
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

from ..reference.outlier import POSITION_BLOCK
from .numba_tools import vector
from .threads import JOB_WORDS

SPAN = 4 * POSITION_BLOCK  # elements processed at once: whole words of 64, and whole blocks of positions
LANES = 16  # lanes of a vector in `survey`
# Results of `choose`: the levels are known; the sample misled; a part had no room for its candidates.
DONE, MISLED, CROWDED = range(3)


class State(ctypes.Structure):
    """What the four kernels share: numbers, and addresses in memory.

    Attributes:
        x, kind, n: address of the elements, their format (traits.KINDS) and number.
        relu, bits, steps: of the quantizer; `steps` lie between the lowest level and the highest.
        stride, rank, below: of the sample; the number whose rank gives the bound, and how far below it the bound is.
        k: number of outliers; −1: all candidates are.
        parts, blocks: of the job; a block has `SPAN` elements.
        room: for candidates, in each part.
        keys: int32: of the sample, then of all candidates.
        found: int32 (blocks,): candidates in each block.
        ends: int32 (parts, 3, LANES): least and greatest keys of the others, and their least magnitude.
        starts, used: int64 (parts + 1,), (parts,): first entry of each part's candidates, and their number.
        firsts, quotas: int64 (parts,): outliers before each part, and its outliers that equal the threshold.
        places, picked: uint16 and float32: offset in its block, and value, of each candidate.
        bound, threshold, kept: magnitudes above which candidates and outliers are; number of outliers.
        result: of `choose`: `DONE`, `MISLED` or `CROWDED`.
        levels, packed, counts, offsets, values: the results, as in `OutlierCompressed`.
        value_kind: format of `values`.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for line in (
            "x kind n relu bits steps stride rank below k parts blocks room",
            "keys found ends starts used firsts quotas places picked bound threshold kept result",
            "levels packed counts offsets values value_kind",
        )
        for name in line.split()
    )


_STATES = np.zeros(1, np.dtype(State))


@njit(inline="always")
def state_of(job: Any) -> Any:
    """Return the `State` whose address is the job's only argument."""
    return vector(carray(job, (JOB_WORDS,))[3], _STATES, 1)[0]
