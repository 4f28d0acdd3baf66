"""A table of kind `stochastic` in the form by which x is rounded: from x to its position between levels.

    v(x) = k + (f'(x) − y_k) / (y_{k+1} − y_k)      for y_k ≤ f'(x) ≤ y_{k+1},      code = ⌊v + ξ⌋,  ξ uniform in [0, 1)

So E[y_code] = f'(x). v is a function of x alone; every device would compute f' with other last digits, and round some
elements otherwise. Instead v is interpolated: straight lines on cells of equal width, whose arithmetic is pinned
(float32, each operation by itself), so that every device finds the same codes.

    t = (x − low) · inverse      cell = ⌊t⌋ + number of jumps below x      v = slope[cell] · x + base[cell]

x is cut to [low, high] first, outside of which f' is settled. A jump of f' has two lines in its cell, one for either
side. v is off by at most `OFF` of the distance of two levels, with no sign: that is the bias that is left. Of 64 levels
and more some are so close that v bends within the narrowest cells; there it was off by up to a thirtieth of their
distance, which is 10⁻⁴ of f'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tables import FewbitError, Table
from .capture import to_last
from .table_registry import round_down, table_of

OFF = 2.0**-10  # of the distance of two levels
_SETTLED = 2.0**-15  # a change of v that counts as none
_WIDEST = 40.0  # |x| beyond which f' is taken as settled
_FIRST, _MOST = 1024, 1 << 16  # cells
_BETWEEN = np.array([0.125, 0.375, 0.5, 0.625, 0.875])  # where a cell is compared

Vector = NDArray[np.float64]
Position = Callable[[Vector], Vector]


@dataclass(frozen=True, eq=False)
class RoundingTable:
    """The numbers above, float32.

    Attributes:
        low, high, inverse: ends of the cells, and their number in an interval of length 1.
        jumps: (j,) where f' jumps, increasing; x beyond one lies to its right.
        base, slope: (cells + j,) of each line.
        last: number of cells less 1.
        top: the greatest code.
        bits: of a code.
    """

    low: float
    high: float
    inverse: float
    jumps: Tensor
    base: Tensor
    slope: Tensor
    last: int
    top: int
    bits: int


@cache
def prepare_rounding(key: str, device: torch.device) -> RoundingTable:
    """Return the table `key`, of kind ``stochastic``, for tensors on `device`.

    Raises:
        FewbitError: it is of another kind, or of a callable, whose derivative is not known here.
    """
    table = table_of(key)
    if table.kind != "stochastic":
        raise FewbitError(f"a table of kind {table.kind} is not rounded at random")
    low, high, inverse, *arrays = _lines(table)
    with torch.device("cpu"):
        jumps, base, slope = (to_last(torch.from_numpy(part.astype(np.float32)), device) for part in arrays)
    last, top = base.numel() - jumps.numel() - 1, table.levels.size - 1
    return RoundingTable(low, high, inverse, jumps, base, slope, last, top, table.bits)


def position(table: Table) -> Position:
    """Return v, float64 to float64: between 0 and K − 1.

    Raises:
        FewbitError: the table is of a callable.
    """
    derivative = _activation(table).derivative
    codes = np.arange(table.levels.size, dtype=np.float64)
    return lambda x: np.interp(derivative(x), table.levels, codes)


def _activation(table: Table) -> Any:
    from ...fewbit_gen import parse_activation  # the compiler, which most trainings do not need

    try:
        return parse_activation(table.activation)
    except FewbitError:
        raise FewbitError(
            f"a table of kind stochastic needs the derivative of {table.activation}, which has no name to find it by"
        ) from None


def _lines(table: Table) -> tuple[float, float, float, Vector, Vector, Vector]:
    """Return low, high and inverse, representable in float32, the jumps, and base and slope of each line."""
    activation, v = _activation(table), position(table)
    with torch.device("cpu"):
        kinks = round_down(np.asarray(activation.kinks, np.float64), torch.float32).double().numpy()
    right = np.nextafter(kinks.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    jumps = kinks[np.abs(v(right) - v(kinks)) > _SETTLED]
    low, high = _ends(v, min(activation.reach, _WIDEST), jumps)
    cells = _FIRST
    while True:
        low32 = float(np.float32(low))
        inverse = float(np.float32(cells / (high - low32)))
        high32 = float(np.float32(low32 + cells / inverse))
        base, slope, off = _cells(v, low32, inverse, cells, jumps)
        if off <= OFF or 2 * cells > _MOST:
            return low32, high32, inverse, jumps, base, slope
        cells *= 2


def _ends(v: Position, reach: float, jumps: Vector) -> tuple[float, float]:
    """Return an interval outside of which v does not change."""
    x = np.linspace(-reach, reach, 8193)
    at = v(x)
    left = np.flatnonzero(np.abs(at - at[0]) > _SETTLED)
    right = np.flatnonzero(np.abs(at - at[-1]) > _SETTLED)
    low = x[max(left[0] - 1, 0)] if left.size else -1.0
    high = x[min(right[-1] + 1, x.size - 1)] if right.size else 1.0
    return min(low, *(jumps - 1.0), low), max(high, *(jumps + 1.0), high)


def _cells(v: Position, low: float, inverse: float, cells: int, jumps: Vector) -> tuple[Vector, Vector, float]:
    """Return base and slope of the lines, and how far they are off."""
    edges = low + np.arange(cells + 1) / inverse
    # The cell of each jump by the arithmetic of the kernels.
    t = (jumps.astype(np.float32) - np.float32(low)) * np.float32(inverse)
    at = np.minimum(t.astype(np.int64), cells - 1)
    lines = 1 + np.bincount(at, minlength=cells)
    cell = np.repeat(np.arange(cells), lines)
    passed = np.arange(cell.size) - cell  # jumps to the left of a line
    after = np.nextafter(jumps.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    least, most = np.append(-np.inf, after)[passed], np.append(jumps, np.inf)[passed]
    first, last = np.clip(edges[cell], least, most), np.clip(edges[cell + 1], least, most)
    flat = last <= first  # nothing of the cell lies on this side of the jump
    slope = np.where(flat, 0.0, (v(last) - v(first)) / np.where(flat, 1.0, last - first))
    base = v(first) - slope * first
    x = first + (last - first) * _BETWEEN[:, None]
    off = float(np.abs(v(x) - (slope * x + base)).max())
    return base, slope, off
