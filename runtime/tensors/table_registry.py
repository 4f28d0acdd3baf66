"""Registered tables: looked up by key, and cast for the arithmetic of each dtype.

An op names its table by a string, which torch.compile treats as a constant: `Table.key`, a digest of the table's
content, which means the same table in every process that has registered it; or the table itself, as JSON, where
compiled graphs that a cache keeps must not depend on that.

Comparisons. x is compared in its own dtype with each boundary rounded *down* to that dtype: for a representable x,
x > b exactly when x > floor(b). So the code of an element never depends on the dtype it is stored in.

Products. Levels are stored in the dtype of arithmetic (float32 for the 16-bit types, else the tensor's own), and
gradient × level is rounded once, to the gradient's dtype. A level of 0 gives 0 for any gradient, infinity and NaN too:
where f' = 0, torch's ReLU and similar functions select.
"""

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ...tables.table import table_from_dict, table_to_dict
from .graphs import to_last
from .traits import arithmetic_dtype

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
