"""Tables given by a user for a whole model or block, by the name of an activation or of a module.

    tables={"gelu": "gelu.json", "softplus(beta=2)": table, "encoder.*.act": other}

A key that matches a module of the model is a module's name, otherwise an activation's; modules take precedence.
"""

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ...tables.names import find_name

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
