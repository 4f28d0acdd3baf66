"""Reads the data of a file into dataclasses: whatever it holds, the result is of the type or the error one line."""

from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from ...tables import FewbitError
from ...tables.errors import shown


def read(kind: Any, data: Any) -> Any:
    """Return the value of a type that the data of a file hold; whatever they are, `FewbitError` is all that they raise.

    Args:
        kind: a type in the fields of `Plan`, or `Plan`.
        data: as JSON has them.
    """
    of, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        types = {f.name: f.type for f in fields(kind)}
        needed = {f.name for f in fields(kind) if f.default is MISSING}
        if not isinstance(data, dict) or not needed <= set(data) <= set(types):
            known = set(data) if isinstance(data, dict) else set()
            wrong = sorted((known - set(types)) or (needed - known))
            raise FewbitError(
                f"a {kind.__name__} has no {wrong[0]}" if known else f"{shown(data)} is no {kind.__name__}"
            )
        return kind(**{name: read(types[name], value) for name, value in data.items()})
    if of is tuple and isinstance(data, list):
        return tuple(read(parts[0], each) for each in data)
    if of is dict and isinstance(data, dict):
        return {name: read(parts[1], value) for name, value in data.items()}
    if of is UnionType and data is None:
        return None
    kind, of = (parts[0], None) if of is UnionType else (kind, of)
    number = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) < _MOST
    if number if kind is float else isinstance(data, int) and number if kind is int else type(data) is kind:
        return data
    raise FewbitError(f"{shown(data)} is no {_NAMES[of or kind]}")


_NAMES = {str: "text", int: "whole number", float: "number", bool: "truth value", tuple: "list", dict: "mapping"}


_MOST = 2**63  # no number of a plan is as large; infinity and NaN are none of its numbers either
