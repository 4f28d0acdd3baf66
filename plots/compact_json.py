"""Compact JSON for the numbers of studies: a list of numbers on one line, curves to six digits.

    compact_json.dumps({"losses": [4.123456789, …], …})
    compact_json.write("losses.json", {"losses": [4.123456789, …], …})      whole or not at all

A list, or a list of lists, of more than `CURVE` numbers is a curve: its floats are rounded to `DIGITS` significant
digits. All other numbers round-trip to the same bits.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from ..tables.files import atomic_write

CURVE = 20
DIGITS = 6
_WIDTH = 200  # columns; values that fit are written on one line, mainly rows of a table
_POINT = 3  # maximum coordinates of a point; a list of points goes on one line, like a list of numbers


def dumps(value: Any) -> str:
    """Return `value` as JSON text with a newline at the end; raises ValueError if a number is not finite."""
    return _text(rounded(value), "") + "\n"


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` to a file, which has the text before or all of it."""
    with atomic_write(path) as stream:
        stream.write(dumps(value).encode())


def rounded(value: Any) -> Any:
    """Return `value` with the floats of its curves rounded, and tuples as lists."""
    if isinstance(value, dict):
        return {str(key): rounded(part) for key, part in value.items()}
    if not isinstance(value, list | tuple):
        return value
    numbers = list(_leaves(value))
    if len(numbers) > CURVE and all(_is_number(number) for number in numbers):
        return _round(value)
    return [rounded(part) for part in value]


def _round(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_round(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any, indent: str) -> str:
    line = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= _WIDTH or _is_one_line(value):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(part, inner)}" for key, part in value.items()]
        return "{\n" + inner + f",\n{inner}".join(parts) + f"\n{indent}}}"
    return "[\n" + inner + f",\n{inner}".join(_text(part, inner) for part in value) + f"\n{indent}]"


def _is_one_line(value: Any) -> bool:
    """Return whether `value` is a list of numbers or of points."""
    if not isinstance(value, list):
        return False
    points = all(isinstance(part, list) and len(part) <= _POINT and all(map(_is_number, part)) for part in value)
    return points or all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaves(value: Any) -> Iterator[Any]:
    for part in value:
        if isinstance(part, list | tuple):
            yield from _leaves(part)
        else:
            yield part
