"""Registered tables, and the levels between which values are rounded at random, in the forms that kernels take.

An op names its table by a string, which torch.compile treats as a constant: `Table.key`, a digest of the table's
content, which means the same table in every process that has registered it; or the table itself, as JSON, where
compiled graphs that a cache keeps must not depend on that.

Comparisons. x is compared in its own dtype with each boundary rounded *down* to that dtype: for a representable x,
x > b exactly when x > floor(b). So the code of an element never depends on the dtype it is stored in.

Products. Levels are stored in the dtype of arithmetic (float32 for the 16-bit types, else the tensor's own), and
gradient × level is rounded once, to the gradient's dtype. A level of 0 gives 0 for any gradient, infinity and NaN too:
where f' = 0, torch's ReLU and similar functions select.

The levels between which values are rounded at random are those of a group, or a table's.

**Groups.** The K = 2^b levels of a group are at t_0 = 0 < … < t_{K−1} = 1 of its range. A value is rounded at random to
one of its two neighbours, without bias wherever the levels lie, and with less variance where they lie closer:

    uniform    t_k = k / (K − 1)
    normal     the best for groups of 256 normal numbers: closer in the middle
    skewed     the best for values after ReLU, GELU and the like: closer near the minimum
    fitted     for each group one of the three, by where its first 64 values lie
    a Table    of kind stochastic: its levels, from the first as 0 to the last as 1

The levels of a shape lie on a *curve*, equally far apart between few knots (fewbit_gen/group_levels.py finds the best).
So a position between levels, and a level from its code, take no look-up but a maximum and a product for each knot, in
pinned arithmetic: float32, each operation by itself, from left to right, with d = (h − Z) · 2^16·B/R:

    position · 2^16    v = c_0 d + Σ_j c_j max(d − K_j, 0) + ½                   K_j of the knots in units of d
    level · B          p = c_0 code + Σ_j c_j max(code − K_j, 0)                 K_j of the knots in codes

A group that chose another shape than uniform says so in the exponent of its saved range R: ranges from 2^-19 to 2^12
are then saved with exponents that no range has otherwise, for no R is saved below `LEAST_RANGE`.

**Tables** of kind `stochastic` take x to its position between levels:

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

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ...tables.table import table_from_dict, table_to_dict
from .graphs import to_last
from .traits import arithmetic_dtype

# ---- registered tables -----------------------------------------------------------------------------------------------


_TABLES: dict[str, Table] = {}


def register_table(table: Table) -> str:
    """Register `table` with the ops and return its key."""
    _TABLES.setdefault(table.key, table)
    return table.key


def register_unpickled(module: object) -> str:
    """Register the table of an unpickled module and return its key; raise `FewbitError` if it has none."""
    table = vars(module).get("_table")
    if not isinstance(table, Table):
        raise FewbitError(f"a pickled {type(module).__name__} holds a fewbit.Table, not {shown(table)}")
    return register_table(table)


def table_text(table: Table) -> str:
    """Return a table as a string that ops accept in any process."""
    return json.dumps(table_to_dict(table), separators=(",", ":"))


def table_of(key: str) -> Table:
    """Return the table registered under `key`, or written there; raise `FewbitError` if this process has none."""
    try:
        return _TABLES[key]
    except KeyError:
        if key.startswith("{"):
            return _TABLES.setdefault(key, _read(key))
        raise FewbitError(
            f"no table {key!r} in this process: make the fewbit module or call register_table before running its ops"
        ) from None


def _read(text: str) -> Table:
    try:
        return table_from_dict(json.loads(text))
    except (ValueError, RecursionError):
        raise FewbitError(f"no table: {shown(text)}") from None


@dataclass(frozen=True)
class Prepared:
    """A table cast for tensors of one dtype.

    Attributes:
        boundaries: (m − 1,) in that dtype, rounded down.
        codes: uint8 (m,).
        levels: (K,) in the dtype of arithmetic.
        bits: of a code.
    """

    boundaries: Tensor
    codes: Tensor
    levels: Tensor
    bits: int


@cache
def prepare(key: str, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Return the table `key` cast for tensors of `dtype`, on `device`."""
    table = table_of(key)
    with torch.device("cpu"):  # whatever the default device
        boundaries = round_down(table.boundaries, dtype)
        codes, levels = torch.tensor(table.codes), torch.tensor(table.levels, dtype=arithmetic_dtype(dtype))
        return Prepared(to_last(boundaries, device), to_last(codes, device), to_last(levels, device), table.bits)


def round_down(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return `values` (float64) in `dtype`, each the largest representable number not above it."""
    exact = torch.tensor(values, dtype=torch.float64)
    nearest = exact.to(dtype)
    if dtype in (torch.float16, torch.bfloat16):  # torch.nextafter lacks float16 on the CPU
        bits = nearest.view(torch.int16)
        smaller = torch.where(bits >= 0, bits - 1, bits + 1)  # sign and magnitude: a negative one grows towards −∞
        smaller = torch.where(nearest == 0, torch.tensor(-0x7FFF, dtype=torch.int16), smaller)  # below 0: −smallest
        below = smaller.view(dtype)
    else:
        below = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=dtype))
    return torch.where(nearest.double() > exact, below, nearest)


# ---- groups' ---------------------------------------------------------------------------------------------------------

Knots = tuple[tuple[int, int], ...]
"""(code, position) between the first level and the last, positions in units of 1 / `GRID`."""

UNIFORM, FITTED = "uniform", "fitted"
GRID = 64  # of knots; fewbit_gen/group_levels.py has the search that gave those below
NORMAL: Mapping[int, Knots] = {
    2: ((1, 24), (2, 40)),
    3: ((1, 14), (6, 50)),
    4: ((1, 8), (3, 17), (12, 47), (14, 56)),
    5: ((2, 8), (6, 17), (25, 47), (29, 56)),
    6: ((5, 9), (12, 17), (51, 47), (58, 55)),
    7: ((9, 8), (27, 18), (100, 46), (118, 56)),
    8: ((21, 9), (55, 18), (201, 46), (234, 55)),
}
SKEWED: Mapping[int, Knots] = {
    2: ((1, 15), (2, 33)),
    3: ((4, 26), (6, 46)),
    4: ((9, 28), (13, 47)),
    5: ((19, 28), (27, 47)),
    6: ((37, 27), (54, 46)),
    7: ((74, 27), (107, 45)),
    8: ((153, 28), (218, 46)),
}
SHAPES: Mapping[str, tuple[Mapping[int, Knots], ...]] = {
    UNIFORM: ({},),
    "normal": ({}, NORMAL),
    "skewed": ({}, SKEWED),
    FITTED: ({}, NORMAL, SKEWED),
}
"""The shapes that groups by each name have: the first is uniform, shapes without knots are so too."""

CHOOSES = -1
# Its biased exponent is 63: the 62 below are free, for the 31 that tell each of two shapes.
LEAST_RANGE = 2.0**-64
# Exponents, biased, of the ranges that can tell a shape, and what their pattern is lowered by for shapes 1 and 2.
FIRST_EXPONENT, EXPONENTS = 108, 31
LOWERED = (0, (FIRST_EXPONENT - 1) << 7, (FIRST_EXPONENT - 1 - EXPONENTS) << 7)
OTHERWISE_LEAST = (2 * EXPONENTS + 1) << 7  # the pattern of `LEAST_RANGE`
# The values that a group chooses by, and the shares of the range between which they are counted.
SAMPLE = 64
BELOW, ABOVE, NOTHING = 0.25, 0.75, 0.015625


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels in the form that kernels take.

    Attributes:
        shape: of all groups, 0 or 1; `CHOOSES` if each group has its own, 0, 1 or 2.
        lines: float32 (9, 3, 2, W), of each number of bits, shape and direction (position, level): the number of knots,
            c_0, and c_j and K_j of each knot.
    """

    shape: int
    lines: Tensor

    @property
    def width(self) -> int:
        """W."""
        return self.lines.shape[-1]


def check_levels(levels: object, bits: int | Tensor | None) -> None:
    """Raise FewbitError unless `levels` names levels, or a table of as many `bits`; samples may have their own."""
    if isinstance(levels, str) and levels in SHAPES:
        return
    if not isinstance(levels, str):
        names = ", ".join(repr(name) for name in SHAPES)
        raise FewbitError(f"levels are {names} or a table of kind 'stochastic', not {shown(levels)}")
    table = table_of(levels)
    if table.kind != "stochastic" or 2**table.bits != table.levels.size:
        raise FewbitError(
            f"levels are those of a table of kind 'stochastic' with 2^bits of them, not of {table.kind!r}"
        )
    if not isinstance(bits, int) or bits != table.bits:
        wanted = f"codes have {bits}" if isinstance(bits, int) else "samples have bits of their own"
        raise FewbitError(f"the table of the levels is one of {table.bits} bits, and {wanted}")


@cache
def prepare_levels(levels: str, device: torch.device) -> Levels:
    """Return the levels by a name or the key of a table, which `check_levels` accepts, for tensors on `device`."""
    if levels in SHAPES:
        knots = {
            (bits, shape): [(code, at / GRID) for code, at in of_bits]
            for shape, curves in enumerate(SHAPES[levels])
            for bits, of_bits in curves.items()
        }
        shape = CHOOSES if levels == FITTED else len(SHAPES[levels]) - 1
    else:
        table = table_of(levels)
        t = (table.levels - table.levels[0]) / (table.levels[-1] - table.levels[0])
        knots, shape = {(table.bits, 1): [*enumerate(t.tolist())][1:-1]}, 1
    width = 2 + 2 * max((len(part) for part in knots.values()), default=0)
    lines = np.zeros((9, 3, 2, width), np.float32)
    lines[..., 1] = 1
    for (bits, of_shape), inner in knots.items():
        B = 2**bits - 1
        codes, at = (np.array(part, np.float64) for part in zip((0, 0.0), *inner, (B, 1.0), strict=True))
        slopes = np.diff(codes) / (np.diff(at) * B)
        for direction, (steep, ends) in enumerate(((slopes, at * B * 65536), (1 / slopes, codes))):
            parts = np.stack([np.diff(steep), ends[1:-1]], axis=1).ravel()
            lines[bits, of_shape, direction, : 2 + parts.size] = [len(inner), steep[0], *parts]
    with torch.device("cpu"):  # whatever the default device
        return Levels(shape, to_last(torch.from_numpy(lines), device))


# ---- a table's -------------------------------------------------------------------------------------------------------

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
    reach = min(activation.reach, _WIDEST)
    x = np.linspace(-reach, reach, 8193)
    at = v(x)
    # An interval outside of which v does not change.
    left, right = (np.flatnonzero(np.abs(at - at[end]) > _SETTLED) for end in (0, -1))
    low = x[max(left[0] - 1, 0)] if left.size else -1.0
    high = x[min(right[-1] + 1, x.size - 1)] if right.size else 1.0
    low, high = min(low, *(jumps - 1.0), low), max(high, *(jumps + 1.0), high)
    cells = _FIRST
    while True:
        low32 = float(np.float32(low))
        inverse = float(np.float32(cells / (high - low32)))
        high32 = float(np.float32(low32 + cells / inverse))
        base, slope, off = _cells(v, low32, inverse, cells, jumps)
        if off <= OFF or 2 * cells > _MOST:
            return low32, high32, inverse, jumps, base, slope
        cells *= 2


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
