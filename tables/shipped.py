"""The tables that come with `fewbit`: one reviewed JSON file an activation, in `tables/data/`.

`fewbit tables build` writes them with the compiler; nothing here computes a table.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .errors import FewbitError, shown
from .json_format import read_json
from .names import counted, find_name, nearest_names, weight_text
from .table import Table, check_bits, check_kind, table_from_dict, table_to_dict

DATA = Path(__file__).parent / "data"
DEFAULT_WEIGHT = "uniform:-10,10"
WEIGHTS = (DEFAULT_WEIGHT, "normal:0,1")


@cache
def shipped_activations() -> tuple[str, ...]:
    """Return the names of the activations that have shipped tables."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


@cache
def _entries(activation: str) -> list[dict[str, Any]]:
    """Return the JSON values of the shipped tables of one activation."""
    return read_json(DATA / f"{activation}.json")["tables"]


@cache
def _table(activation: str, index: int) -> Table:
    """Return one shipped table; building one checks its fields, which takes longer than to find it among 48."""
    return table_from_dict(_entries(activation)[index], source=str(DATA / f"{activation}.json"))


def shipped_tables(activation: str) -> tuple[Table, ...]:
    """Return all shipped tables of one activation, given by its canonical name."""
    return tuple(_table(activation, index) for index in range(len(_entries(activation))))


def forget_tables() -> None:
    """Read the files of tables again when one is next asked for: they were written anew."""
    for function in (shipped_activations, _entries, _table):
        function.cache_clear()


def find_table(activation: str, bits: int, kind: str, weight: str) -> Table | None:
    """Return the best shipped table of at most `bits` bits, or None if the activation or weight has no shipped tables.

    An activation with a piecewise-constant derivative (ReLU) has an exact table, which may need fewer bits.
    """
    if activation not in shipped_activations():
        return None
    fits = [
        (index, entry)
        for index, entry in enumerate(_entries(activation))
        if (entry["kind"], entry["weight"]) == (kind, weight) and entry["bits"] <= bits
    ]
    exact = [index for index, entry in fits if entry["error"] == 0]
    best = exact or [index for index, entry in fits if entry["bits"] == bits]
    return _table(activation, best[0]) if best else None


def load_table(activation: str, bits: int = 3, kind: str = "shared", *, weight: str = DEFAULT_WEIGHT) -> Table:
    """Return a shipped table.

    Args:
        activation: a name such as ``gelu``; case and underscores do not matter.
        bits: 1 to 8. If fewer bits represent the derivative exactly (ReLU), that table is returned.
        kind: ``shared`` or ``interval``.
        weight: the weight that it was solved for; ``uniform:-10.0,1e1`` equals ``uniform:-10,10``.

    Raises:
        FewbitError: there is no such table; the message lists those that exist.

    Example:
        table = fewbit.load_table("gelu", bits=3)
    """
    check_bits(bits)
    kind = check_kind(kind)
    name = find_name(activation, shipped_activations())
    if name is None:
        near = nearest_names(activation, shipped_activations())
        hint = f"nearest: {', '.join(near)}" if near else f"shipped: {', '.join(shipped_activations())}"
        raise FewbitError(f"no shipped table for {shown(activation)}; {hint}")
    if not isinstance(weight, str):
        raise FewbitError(f"a shipped table is found by the text of its weight, such as {DEFAULT_WEIGHT}")
    table = find_table(name, bits, kind, weight_text(weight))
    if table is None:
        raise FewbitError(
            f"no shipped table for {name} at {counted(bits, 'bit')}, {kind}, {shown(weight)} "
            f"(shipped: {_inventory(shipped_tables(name))}); fewbit.solve makes any other"
        )
    return table


def _inventory(tables: Sequence[Table]) -> str:
    """Return the available bits of each kind and weight: ``shared uniform:-10,10 in 1, 2, 3 bits; …``."""
    bits: dict[tuple[str, str], list[int]] = {}
    for table in tables:
        bits.setdefault((table.kind, table.weight), []).append(table.bits)
    return "; ".join(
        f"{kind} {weight} in {', '.join(map(str, sorted(have)))} bit{'s' if have != [1] else ''}"
        for (kind, weight), have in bits.items()
    )


def dump_tables(tables: Sequence[Table], provenance: str) -> str:
    """Return the JSON text of a file of tables, one field a line, with their provenance."""
    entries = []
    for table in tables:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table_to_dict(table).items()]
        entries.append("{" + ",\n ".join(lines) + "}")
    return f'{{"provenance": {json.dumps(provenance)},\n"tables": [\n' + ",\n".join(entries) + "\n]}\n"
