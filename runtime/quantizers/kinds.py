"""The quantizers that methods take by a word: groups between minimum and maximum, or rotated groups."""

from typing import Literal

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.levels import UNIFORM
from .per_group import PerGroup
from .rotated import Rotated

QuantizerKind = Literal["groups", "rotated"]


def check_kind(kind: object) -> None:
    """Raise FewbitError unless `kind` is "groups" or "rotated"."""
    if kind not in ("groups", "rotated"):
        raise FewbitError(f"quantizer is 'groups' or 'rotated', not {shown(kind)}")


def quantizer_of(kind: QuantizerKind, bits: int, levels: str = UNIFORM) -> PerGroup | Rotated:
    """Return the quantizer of a kind; `levels` are those of groups."""
    check_kind(kind)
    return Rotated(bits) if kind == "rotated" else PerGroup(bits, levels=levels)
