"""From the user's arguments (an activation, bits, perhaps a table) to the key of a registered table.

Only here does the runtime call the compiler: for an activation without a shipped table, such as Softplus(beta=5).

Tables may be given for a whole model or block, by the name of an activation or of a module:

    tables={"gelu": "gelu.json", "softplus(beta=2)": table, "encoder.*.act": other}

A key that matches a module of the model is a module's name, otherwise an activation's; modules take precedence.
"""

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

import torch

from ...tables import DEFAULT_WEIGHT, FewbitError, Kind, Table
from ...tables.errors import shown
from ...tables.names import find_name
from ...tables.shipped import find_table
from ...tables.table import check_bits
from ..backends.forwards import forward_of
from ..tensors.table_registry import register_table

DEFAULT_BITS = 3
DEFAULT_KIND = "shared"
# Of the inputs for which tables of each rounding are best. At random an element between far levels errs by their
# distance: levels for inputs as far out as 10 had up to 12 times the variance of ActNN's groups on narrow inputs, those
# for a normal distribution 0.5 to 2.7 times.
WEIGHT_OF_KIND = {"shared": DEFAULT_WEIGHT, "stochastic": "normal:0,1"}

# How f'(x) becomes a level: always the same one for the same x, with the least error; or one of two neighbours at
# random, so that the gradient is f'(x) on average.
Rounding = Literal["deterministic", "stochastic"]


def resolve_table(
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Table:
    """Return the table to use for torch's `function` with `parameters`.

    Args:
        function: a name in `FORWARDS`.
        parameters: values of its parameters, in their order.
        bits: 1 to 8; 3 if neither this nor `table` is given.
        table: used as it is. It may be of any activation: that is the user's choice.
        rounding: as the table's kind, if None; without a table ``deterministic``. An exact table rounds nothing, and is
            the same for both.

    Raises:
        FewbitError: bits, table and rounding contradict each other, an argument is out of range, or f' has no bounds
            between which ``stochastic`` could round.
    """
    check_rounding(rounding)
    if table is None:
        bits = check_bits(DEFAULT_BITS if bits is None else bits)
        found = _default_table(function, parameters, bits, DEFAULT_KIND)
        if rounding == "stochastic" and found.error > 0:
            return _default_table(function, parameters, bits, "stochastic")
        return found
    if not isinstance(table, Table):
        raise FewbitError(f"table must be a fewbit.Table, not {type(table).__name__}; read one with Table.from_json")
    if bits is not None and table.bits > check_bits(bits):
        raise FewbitError(f"the table takes {table.bits} bits, more than bits={bits}; leave bits out")
    if rounding is not None and (rounding == "stochastic") != (table.kind == "stochastic") and table.error > 0:
        raise FewbitError(f"a table of kind {table.kind} is not rounded as rounding={rounding!r} says; leave that out")
    return table


def check_rounding(rounding: object) -> None:
    """Raise `FewbitError` unless `rounding` is None or one of `Rounding`."""
    if rounding not in (None, "deterministic", "stochastic"):
        raise FewbitError(f"rounding is 'deterministic' or 'stochastic', not {shown(rounding)}")


@torch.compiler.assume_constant_result
def resolve_key(
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> str:
    """Return the key under which the table of `resolve_table` is registered."""
    return register_table(resolve_table(function, parameters, bits, table, rounding))


@cache
def _default_table(function: str, parameters: tuple[float, ...], bits: int, kind: Kind) -> Table:
    name = forward_of(function).activation_name(function, parameters)
    shipped = find_table(name, bits, kind, WEIGHT_OF_KIND[kind])
    if shipped is not None:
        return shipped
    from ...fewbit_gen import parse_activation, parse_weight
    from ...fewbit_gen.library import find_or_solve

    weight = parse_weight(WEIGHT_OF_KIND[kind])
    return find_or_solve(parse_activation(name), bits, kind, weight, certify=False)  # not needed to train


# ---- tables for a whole model ---------------------------------------------------------------------------------------

TableOrPath = Table | str | os.PathLike[str]


def read_tables(tables: Mapping[str, TableOrPath] | None) -> dict[str, Table]:
    """Return `tables` with files replaced by the tables read from them.

    Raises:
        FewbitError: `tables` is not a mapping from names to tables or files, or a file holds no table.
    """
    if tables is None:
        return {}
    if not isinstance(tables, Mapping) or not all(isinstance(key, str) for key in tables):
        raise FewbitError(f"tables must map names to tables or their files, not {shown(tables)}")
    return {key: _table(key, value) for key, value in tables.items()}


def _table(key: str, value: TableOrPath) -> Table:
    if isinstance(value, Table):
        return value
    if isinstance(value, str | os.PathLike):
        return Table.from_json(value)
    raise FewbitError(f"tables[{key!r}] must be a fewbit.Table or the path of one, not {type(value).__name__}")


def key_for_activation(tables: Mapping[str, Table], activation: str) -> str | None:
    """Return the key that names `activation` in any spelling: GELU and Swish are gelu and silu."""
    return next((key for key in tables if names_activation(key, activation)), None)


def names_activation(key: str, activation: str) -> bool:
    """Return whether `key` is a spelling of the activation: ``Softplus(beta=2)`` of ``softplus(beta=2)``."""
    key = "".join(key.split())
    if key == activation:
        return True
    family, bracket, arguments = activation.partition("(")
    given, _, given_arguments = key.partition("(")
    return find_name(given, [family]) is not None and given_arguments == arguments and ("(" in key) == bool(bracket)


def key_for_module(tables: Mapping[str, Table], names: Collection[str]) -> str | None:
    """Return the key for a module with these `names`: one of them, or else the first pattern that matches one."""
    exact = next((key for key in tables if key in names), None)
    return exact or next((key for key in tables if any(fnmatchcase(name, key) for name in names)), None)
