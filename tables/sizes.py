"""Sizes in bytes, as people write them."""

import re
from numbers import Real
from typing import Any

from .errors import FewbitError, shown

# 16G means 16 GiB, the convention for GPUs.
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}


_MOST = 2**63  # bytes, of which whole numbers of every kind hold fewer


def parse_size(value: object) -> int:
    """Return a whole number of bytes, from a number or a text such as ``16GiB`` or ``80GB``.

    Raises:
        FewbitError: it is no such text, or not above 0.
    """
    number: Any = value  # Real says too little of its numbers to a checker of types
    if isinstance(value, Real) and not isinstance(value, bool) and 1 <= number < _MOST:
        return int(number)
    text = value.strip().lower() if isinstance(value, str) else ""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text)
    if found is None or found[2] not in _UNITS or not 1 <= float(found[1]) * _UNITS[found[2]] < _MOST:
        raise FewbitError(f"{shown(value)} is not a size such as 16GiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2]])
