"""Tables as JSON: one object a table, every number written so that it reads back to the same bits."""

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .errors import FewbitError, shown
from .files import atomic_write, reason
from .names import counted
from .table import Table

FORMAT = 1
_FIELDS = tuple(field.name for field in fields(Table))
# A table of 256 shared levels takes about 30 kB: a file far larger is not one.
_MAX_BYTES = 16_000_000


def table_to_dict(table: Table) -> dict[str, Any]:
    """Return the fields of `table` as JSON values, with the number of bits and of the format."""
    return {
        "format": FORMAT,
        "activation": table.activation,
        "kind": table.kind,
        "bits": table.bits,
        "weight": table.weight,
        "error": table.error,
        "lower_bound": table.lower_bound,
        "boundaries": table.boundaries.tolist(),
        "codes": table.codes.tolist(),
        "levels": table.levels.tolist(),
    }


def table_from_dict(data: object, source: str = "table") -> Table:
    """Return the table that `data` describes.

    Raises:
        FewbitError: `data` is not what `table_to_dict` returns; the message begins with `source`.
    """
    if not isinstance(data, dict):
        raise FewbitError(f"{source}: not a table: expected a JSON object with {', '.join(_FIELDS)}")
    if not _is_int(data.get("format"), FORMAT):
        raise FewbitError(f"{source}: table format {shown(data.get('format'))}; this fewbit reads {FORMAT}")
    missing = [name for name in _FIELDS if name not in data]
    unknown = sorted(set(data) - {*_FIELDS, "format", "bits"})
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(map(repr, unknown))}"
        raise FewbitError(f"{source}: the table {wrong:.200}")
    try:
        table = Table(**{name: data[name] for name in _FIELDS})
    except FewbitError as error:
        raise FewbitError(f"{source}: {error}") from None
    if "bits" in data and not _is_int(data["bits"], table.bits):
        size = f"a table of {counted(table.levels.size, 'level')} takes {counted(table.bits, 'bit')}"
        raise FewbitError(f"{source}: {size}, not {shown(data['bits'])}")
    return table


def _is_int(value: object, expected: int) -> bool:
    return type(value) is int and value == expected  # True and 1.0 equal 1


def dumps(value: dict[str, Any]) -> str:
    """Return `value` as indented JSON text with a newline at the end."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def dump_tables(tables: Sequence[Table], provenance: str) -> str:
    """Return the JSON text of a file of tables, a line for each of their fields, with how they came about."""
    entries = []
    for table in tables:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table_to_dict(table).items()]
        entries.append("{" + ",\n ".join(lines) + "}")
    return f'{{"provenance": {json.dumps(provenance)},\n"tables": [\n' + ",\n".join(entries) + "\n]}\n"


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Write `table` to `path`, whole or not at all; raises `FewbitError` if that cannot be done."""
    with atomic_write(path) as stream:
        stream.write(dumps(table_to_dict(table)).encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value in the file `path`; raises `FewbitError` naming the file if there is none."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise FewbitError(f"cannot read {os.fspath(path)}: {reason(error)}") from None
    if len(content) > _MAX_BYTES:
        raise FewbitError(f"{os.fspath(path)}: larger than {_MAX_BYTES} bytes, so not a table")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FewbitError(f"{os.fspath(path)}: not JSON: {why}") from None


def read_table(path: str | os.PathLike[str]) -> Table:
    """Return the table in the file `path`; raises `FewbitError` naming the file if there is none."""
    return table_from_dict(read_json(path), source=os.fspath(path))
