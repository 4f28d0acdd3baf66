"""From x to its code and from a code to its level, in CUDA C++: the constants of a table and how they are searched.

    sum     up to SUM_LIMIT boundaries: code = c_0 + Σ_i [x > b_i] (c_{i+1} − c_i), all of it immediates
    cells   the line is cut into equal cells, each with at most one boundary: one multiplication finds the cell, one
            comparison with its boundary the code. A cell is 8 bytes of shared memory, filled once by each block
    bisect  all other tables, whose boundaries are too close: a branch-free binary search over an array

An activation is limited by memory bandwidth, so the search must be a few instructions. Comparisons run at half the rate
of multiplications, and a sum takes two instructions a boundary: beyond a handful, cells are cheaper, and cost the same
for 9 boundaries as for 500.

Every comparison is `!(x <= b)`, which is true for NaN too: it falls in the last interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import indent
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .....tables import Table
from .....tables.exporters.rows import rows
from .....tables.rounding import float_below, nearest_float

Arithmetic = Literal["float", "double"]
Search = Literal["sum", "cells", "bisect"]

SUM_LIMIT = 4
# Shared memory of a block is 48 KiB, 8 of them for staging.
CELL_BYTES = 40_000
SELECT_LIMIT = 4  # number of levels; more are looked up in shared memory


@dataclass(frozen=True)
class Cells:
    """Equal cells over the line; cell `i` is where round(count·saturate(shift − x·scale)) = i.

    Cells are counted from the right, because saturate(NaN) is 0 and NaN belongs to the last interval.

    Attributes:
        count: number of cells less one.
        scale, shift: floats.
        boundary: (count + 1,) the boundary in each cell; any number where there is none.
        below, above: uint8 (count + 1,) the codes up to the boundary, and above it.
    """

    count: int
    scale: float
    shift: float
    boundary: NDArray
    below: NDArray[np.uint8]
    above: NDArray[np.uint8]


def boundaries_in(table: Table, arithmetic: Arithmetic) -> tuple[NDArray, NDArray[np.uint8]]:
    """Return the boundaries, rounded down to `arithmetic`, and the codes, without intervals that contain no number."""
    boundaries = float_below(table.boundaries) if arithmetic == "float" else table.boundaries
    boundaries, first = np.unique(boundaries, return_index=True)
    return boundaries, np.append(table.codes[:-1][first], table.codes[-1])


def choose_search(table: Table, arithmetic: Arithmetic) -> Search:
    """Return the cheapest search that the table allows."""
    boundaries, _ = boundaries_in(table, arithmetic)
    if boundaries.size <= SUM_LIMIT:
        return "sum"
    return "bisect" if find_cells(table, arithmetic) is None else "cells"


@lru_cache(maxsize=2)  # the choice of a search, and its text
def find_cells(table: Table, arithmetic: Arithmetic) -> Cells | None:
    """Return the fewest cells with one boundary each, or None if too many would be needed."""
    boundaries, codes = boundaries_in(table, arithmetic)
    if boundaries.size == 0 or not np.isfinite(boundaries).all():
        return None
    with np.errstate(over="ignore", under="ignore"):
        x = boundaries.astype(np.float32)
        width = float(x[-1]) - float(x[0])
    if not width < 2.0**60 or max(abs(float(x[0])), abs(float(x[-1]))) > 2.0**60:
        return None
    most = CELL_BYTES // (8 if arithmetic == "float" else 16) - 1
    for count in [*(c for c in _COUNTS if c < most), most]:
        for stretch in _STRETCHES:
            scale = np.float32(1 / (max(width, 2.0**-60) * stretch))
            shift = np.float32(float(x[-1]) * float(scale))
            cell = _cells_of(x, count, scale, shift)
            if cell is not None and (np.diff(cell) < 0).all():
                return _filled(boundaries, codes, cell, count, scale, shift)
    return None


_COUNTS = [2**i for i in range(4, 13)]  # of cells, 16 to 4,096: the fewest that will do
# The same number of cells a little wider, if a boundary is on an edge or two share a cell.
_STRETCHES = (1.0, 1.01, 1.05, 1.1, 1.2, 1.3, 1.4)


def _cells_of(x: NDArray[np.float32], count: int, scale: np.float32, shift: np.float32) -> NDArray[np.int64] | None:
    """Return the cells of boundaries, or None if rounding could move one of them to another cell.

    Other numbers need no check: the kernel's operations are monotone, so a number beyond a boundary is in the
    boundary's cell or beyond it.
    """
    exact = float(shift) - x.astype(np.float64) * float(scale)
    # Twice the error of one float operation on the largest number involved.
    error = 2.0**-22 * max(1.0, abs(float(shift)))
    least, most = (np.rint(np.clip(exact + e, 0, 1) * count * (1 + e)).astype(np.int64) for e in (-error, error))
    return least if (least == most).all() else None


def _filled(
    boundaries: NDArray,
    codes: NDArray[np.uint8],
    cell: NDArray[np.int64],
    count: int,
    scale: np.float32,
    shift: np.float32,
) -> Cells:
    # Numbers in cell i are above all boundaries in later cells, so they belong to the first interval after those.
    after = np.searchsorted(-cell, -np.arange(count + 1), side="left")
    boundary = np.zeros(count + 1, boundaries.dtype)
    boundary[cell] = boundaries
    below, above = codes[after], codes[after].copy()
    above[cell] = codes[1:]
    return Cells(count, float(scale), float(shift), boundary, below, above)


def codes_struct(table: Table, arithmetic: Arithmetic, search: Search | None = None) -> str:
    """Return the C++ struct `Codes<arithmetic>`, whose `of(x, table)` is the code of x.

    Args:
        table: the table.
        arithmetic: type of x and the boundaries.
        search: search to use; the cheapest if None.

    Raises:
        ValueError: `search` is cells and the boundaries are too close for them.
    """
    search = search or choose_search(table, arithmetic)
    text = {"sum": _sum, "cells": _cells, "bisect": _bisect}[search](table, arithmetic)
    return f"""\
// The code of a {arithmetic}: {_HOW[search]}.
template <> struct Codes<{arithmetic}> {{
    static constexpr int bits = {table.bits};
{text}}};
"""


def levels_struct(table: Table, arithmetic: Arithmetic) -> str:
    """Return the C++ struct `Levels<arithmetic>`, whose `of(code, table)` is the level; 0 for codes without one."""
    levels = nearest_float(table.levels) if arithmetic == "float" else table.levels
    levels = np.pad(levels, (0, (1 << table.bits) - levels.size))
    has_zero = str(bool((levels == 0).any())).lower()
    head = (
        f"    static constexpr int bits = {table.bits};\n"
        f"    static constexpr bool has_zero = {has_zero};  // there 0 is selected, as torch does where f' = 0\n"
    )
    body = _selected(levels, arithmetic) if levels.size <= SELECT_LIMIT else _looked_up(levels, arithmetic)
    return f"// The level of a code.\ntemplate <> struct Levels<{arithmetic}> {{\n{head}{body}}};\n"


_HOW = {
    "sum": "the first interval's, and at each boundary that x is above the step to the next",
    "cells": "of the cell that x lies in, below or above the one boundary there",
    "bisect": "a binary search of fixed length",
}
_NOTHING_SHARED = """\
    struct Shared {};
    static __device__ void fill(Shared&) {}
"""


def _sum(table: Table, arithmetic: Arithmetic) -> str:
    boundaries, codes = boundaries_in(table, arithmetic)
    steps = np.diff(codes.astype(int)).tolist()
    lines = [
        f"code += !(x <= {literal(b)}) ? {step} : 0;" for b, step in zip(boundaries, steps, strict=True) if step != 0
    ]
    return _NOTHING_SHARED + _function(f"{arithmetic} x, const Shared&", [f"int code = {codes[0]};", *lines], "code")


def _cells(table: Table, arithmetic: Arithmetic) -> str:
    cells = find_cells(table, arithmetic)
    if cells is None:
        raise ValueError("the boundaries lie too close for cells")
    values, which = np.unique(cells.boundary, return_inverse=True)  # most cells have none
    literals = [literal(value) for value in values]
    entries = (
        f"{{{literals[b]},~{below | above << 8}}}"  # ~ is a space at which no line breaks
        for b, below, above in zip(which.tolist(), cells.below.tolist(), cells.above.tolist(), strict=True)
    )
    x = "x" if arithmetic == "float" else "float(x)"
    minus_scale, shift = literal(np.float32(-cells.scale)), literal(np.float32(cells.shift))
    code = "(!(x <= here.boundary) ? here.codes >> 8 : here.codes) & 255"
    lines = [
        "// Adding 2^23 rounds to a whole number, which then stands in the low bits.",
        f"const float t = __saturatef(fmaf({x}, {minus_scale}, {shift}));",
        f"const u32 cell = __float_as_uint(fmaf(t, {cells.count}.0f, 8388608.0f)) - 0x4b000000u;",
        "const Cell& here = table.cells[cell];",
    ]
    return f"""\
    struct alignas({8 if arithmetic == "float" else 16}) Cell {{
        {arithmetic} boundary;
        u32 codes;  // at most at the boundary, and above it times 256
    }};
    static constexpr int count = {cells.count + 1};
    struct Shared {{ Cell cells[count]; }};
    static __device__ void fill(Shared& table)
    {{
        static __device__ const Cell cells[count] = {{
{rows(", ".join(entries), 116, 12).replace("~", " ")}
        }};
        for (int i = threadIdx.x; i < count; i += blockDim.x)
            table.cells[i] = cells[i];
        __syncthreads();
    }}
""" + _function(f"{arithmetic} x, const Shared& table", lines, code)


def _bisect(table: Table, arithmetic: Arithmetic) -> str:
    boundaries, codes = boundaries_in(table, arithmetic)
    count = boundaries.size
    if count == 0:
        return _sum(table, arithmetic)
    lines = [
        f"static __device__ const {arithmetic} boundaries[{count}] = {{",
        rows(", ".join(map(literal, boundaries)), 116, 4),
        "};",
        f"static __device__ const u8 codes[{count + 1}] = {{",
        rows(", ".join(map(str, codes.tolist())), 116, 4),
        "};",
        "int at = 0;",
    ]
    left = count
    while left > 1:
        lines.append(f"at += !(x <= boundaries[at + {left // 2 - 1}]) ? {left // 2} : 0;")
        left -= left // 2
    lines.append("at += !(x <= boundaries[at]) ? 1 : 0;")
    return _NOTHING_SHARED + _function(f"{arithmetic} x, const Shared&", lines, "codes[at]")


def _selected(levels: NDArray, arithmetic: Arithmetic) -> str:
    """Return the levels as immediates, selected by the bits of the code."""
    chosen = [literal(level) for level in levels]
    bit = 1
    while len(chosen) > 1:
        wrap = "({})" if len(chosen) > 2 else "{}"
        chosen = [wrap.format(f"code & {bit} ? {b} : {a}") for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
        bit *= 2
    return _NOTHING_SHARED + _function("u32 code, const Shared&", [], chosen[0], arithmetic)


def _looked_up(levels: NDArray, arithmetic: Arithmetic) -> str:
    size = levels.size
    return f"""\
    struct Shared {{ {arithmetic} levels[{size}]; }};
    static __device__ void fill(Shared& table)
    {{
        static __device__ const {arithmetic} levels[{size}] = {{
{rows(", ".join(map(literal, levels)), 116, 12)}
        }};
        for (int i = threadIdx.x; i < {size}; i += blockDim.x)
            table.levels[i] = levels[i];
        __syncthreads();
    }}
""" + _function("u32 code, const Shared& table", [], "table.levels[code]", arithmetic)


def _function(arguments: str, lines: Sequence[str], result: str, returns: str = "u32") -> str:
    body = indent("\n".join([*lines, f"return {result};"]), " " * 8)
    return f"    static __device__ {returns} of({arguments})\n    {{\n{body}\n    }}\n"


def literal(value: np.floating) -> str:
    """Return the C++ literal of a float32 or float64 that reads back to the same bits."""
    suffix = "f" if value.dtype == np.float32 else ""
    if np.isinf(value):
        return f"({'-' if value < 0 else ''}1.0{suffix} / 0.0{suffix})"
    text = repr(float(str(value)))  # the shortest that reads back in its own type
    return text + suffix
