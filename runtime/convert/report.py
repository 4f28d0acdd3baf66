"""The report of `fewbit.convert`: rows of replaced and left modules, printed as tables."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from ...tables.columns import columns


@dataclass(frozen=True)
class Replaced:
    """One activation or layer that was replaced.

    Attributes:
        name: qualified name in the model; the first one of a shared module; "" for the model itself.
        was, now: the repr of the module before and after.
        bits: saved for each element; for a layer from `level` L3 on, the average over all layers; NaN if it is saved
            exactly.
        error: of its table, under the weight that the table is for; NaN for a layer, which has no table.
        saved: bytes freed by this row and the rows printed with it, negative if they add; None if not measured.
    """

    name: str
    was: str
    now: str
    bits: float
    error: float
    saved: int | None = None


@dataclass(frozen=True)
class Left:
    """One activation or layer that was not replaced, and the reason."""

    name: str
    was: str
    why: str


Row = TypeVar("Row", Replaced, Left)


@dataclass(frozen=True, repr=False)
class Report:
    """The replaced and the left modules. `str(report)` prints rows that differ in a number of their name as one line.

    Attributes:
        model: the converted model: the given object, or the new module if that was itself an activation.
        replaced, left: in the order of `model.named_modules()`.
        notes: further lines.
    """

    model: nn.Module = field(compare=False)
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["nothing was replaced"]
        if self.replaced:
            body = [
                (_names(group), group[0].was, group[0].now, _number(group[0].bits), _number(group[0].error))
                for group in grouped(self.replaced)
            ]
            heads = ("name", "was", "is", "bits", "table error")
            if any(row.saved is not None for row in self.replaced):
                heads = (*heads, "saved")
                body = [(*row, _size(group[0].saved)) for row, group in zip(body, grouped(self.replaced), strict=True)]
            lines = [*columns([heads, *body], left=3)]
        if self.left:
            body = [(_names(group), group[0].was, group[0].why) for group in grouped(self.left)]
            lines += ["", *columns([("left", "was", "why"), *body], left=3)]
        return "\n".join([*lines, *(("", *self.notes) if self.notes else ())])

    def __repr__(self) -> str:
        return f"<{len(self.replaced)} activations replaced, {len(self.left)} left; print() tells which>"


def report_of(model: nn.Module, replaced: Sequence[Replaced], left: Sequence[Left], notes: Sequence[str]) -> Report:
    """Return the report on `model`, its rows in the order of modules."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def place(row: Replaced | Left) -> float:
        name = row.name
        while name not in order:  # a function in an attribute takes the position of the module that holds it
            name = name.rpartition(".")[0]
        return order[name]

    return Report(model, tuple(sorted(replaced, key=place)), tuple(sorted(left, key=place)), tuple(notes))


def one_line(module: object) -> str:
    """Return the repr of a module on one line: the text of a row."""
    return " ".join(repr(module).split())


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Return groups of rows that differ only in the numbers of their names."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(replace(row, name=_pattern(row.name)), []).append(row)
    return list(groups.values())


def size_text(size: float) -> str:
    """Return bytes with a unit: 1.5 MiB, -512 B."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _size(saved: int | None) -> str:
    return "" if saved is None else size_text(saved)


def _number(error: float) -> str:
    return "" if math.isnan(error) else f"{error:.3g}"


def _names(group: Sequence[Row]) -> str:
    if len(group) == 1:
        return group[0].name or "(the model)"
    return f"{_pattern(group[0].name)} ×{len(group)}"


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
