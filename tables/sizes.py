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


def parse_share(value: object) -> float | None:
    """Return the part of a size that a text such as ``50%`` names, above 0 and at most 1; None without a percent sign.

    Raises:
        FewbitError: there is a percent sign, and no such part.
    """
    if not isinstance(value, str) or "%" not in value:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", value.strip())
    if found is None or not 0 < float(found[1]) <= 100:
        raise FewbitError(f"{shown(value)} is not a share of the exact step's peak, such as 50%")
    return float(found[1]) / 100


def size_like(size: int, unit_of: int, exactly: bool = False) -> str:
    """Return bytes as a person writes them who wrote `unit_of`: in GB beside 24 GB, in GiB beside 16 GiB.

    A size is in the units in which `unit_of` takes fewest digits, and rounded up, so that it suffices if it is given;
    `exactly` adds the number of bytes.
    """
    bases = {1000: "KB MB GB TB", 1024: "KiB MiB GiB TiB"}
    shortest = min(bases, key=lambda base: len(_rounded(unit_of, base)[0]))
    number, power = _rounded(size, shortest)
    text = f"{number} {['bytes', *bases[shortest].split()][power]}"
    return f"{text} ({size:,} bytes)" if exactly and power else text


def _rounded(size: int, base: int) -> tuple[str, int]:
    """Return a size in the largest power of `base` that it has, to two digits after the point, and that power."""
    power = max((p for p in range(5) if size >= base**p), default=0)
    hundredths = -(-100 * size // base**power)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip("."), power
