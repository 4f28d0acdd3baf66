"""The text form of weights, as used on the command line and in tables."""

import re
from collections.abc import Callable
from pathlib import Path

from ...tables.errors import FewbitError, shown
from ...tables.names import nearest_names, read_number
from .families import laplace, normal, uniform
from .files import READERS, read_weight
from .mixture import mixture
from .weight import Weight

ACCEPTED = (
    "uniform:A,B, normal:MEAN,DEVIATION, laplace:MEAN,SCALE, a mixture such as 0.7*normal:0,1+0.3*laplace:1,2, "
    "or a .npy .txt .csv .npz .json file"
)

_FAMILIES: dict[str, Callable[[float, float], Weight]] = {"uniform": uniform, "normal": normal, "laplace": laplace}
# The plus between two parts is followed by a share and a star; the plus of an exponent, 1e+5, follows an e.
_BETWEEN_PARTS = re.compile(r"(?<![eE])\+(?=[\s\d.]+(?:[eE][+-]?\d+)?\s*\*)", re.ASCII)


def parse_weight(spec: str, *, files: bool = True) -> Weight:
    """Return the weight that `spec` describes: a family with its parameters, a mixture, or the name of a file.

    Args:
        spec: the text.
        files: whether it may name a file; not where the text comes from someone else.

    Raises:
        FewbitError: `spec` is not a weight; the message says what is accepted.
    """
    family = spec.partition(":")[0].strip().lower()
    if family == "histogram":
        raise FewbitError(f"{shown(spec)} names what a measured weight holds; give the file that it came from")
    if files and family not in _FAMILIES and Path(spec).suffix.lower() in READERS:
        return read_weight(spec)
    if "*" in spec:
        return mixture(*(_part(part, spec) for part in _BETWEEN_PARTS.split(spec)))
    return _named(spec, spec)


def _part(text: str, spec: str) -> tuple[float, Weight]:
    share, star, weight = text.partition("*")
    if not star:
        raise _unreadable(spec)
    return _number(share, spec), _named(weight, spec)


def _named(text: str, spec: str) -> Weight:
    family, _, numbers = text.partition(":")
    make = _FAMILIES.get(family.strip().lower())
    values = numbers.split(",")
    if make is None or len(values) != 2:
        raise _unreadable(spec)
    return make(_number(values[0], spec), _number(values[1], spec))


def _number(text: str, spec: str) -> float:
    number = read_number(text)
    if number is None:
        raise _unreadable(spec)
    return number


def _unreadable(spec: str) -> FewbitError:
    family, colon, numbers = spec.partition(":")
    misspelt = colon and family.isalpha() and family.lower() not in _FAMILIES
    near = nearest_names(family, _FAMILIES) if misspelt else []
    accepted = f"did you mean {near[0]}:{numbers}?" if near else f"write {ACCEPTED}"
    return FewbitError(f"cannot read the weight {shown(spec)}; {accepted}")
