"""The report of `fewbit.convert`: replaced and left modules and what stays exact, printed in lines of 100 columns."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import TypeVar

from torch import nn

from ...tables.columns import WIDTH, columns

# Characters of what may be longer: names of modules, their texts at least, names of ops.
_NAME, _MODULE, _OP = 36, 38, 28


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


@dataclass(frozen=True)
class Exact:
    """What a function saves that a module's own forward pass calls: no module stands for it that could be replaced.

    Attributes:
        where: class of the module, and file and line of the call.
        op: that saves it, or the function.
        saved: bytes; None if not measured.
        remedy: what would save it in few bits.
    """

    where: str
    op: str
    saved: int | None
    remedy: str


Row = TypeVar("Row", Replaced, Left)


@dataclass(frozen=True, repr=False)
class Report:
    """The replaced and the left modules. `str(report)` prints rows that differ in a number of their name as one line.

    Attributes:
        model: the converted model: the given object, or the new module if that was itself an activation.
        replaced, left: in the order of `model.named_modules()`.
        notes: further lines.
        exact: what functions save that forward passes call; with `inputs`, all of it, and else activations alone.
    """

    model: nn.Module = field(compare=False)
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()
    exact: tuple[Exact, ...] = ()

    def __str__(self) -> str:
        lines = ["nothing was replaced"]
        if self.replaced:
            lines = _replaced_lines(self.replaced)
        by_reason: dict[str, list[tuple[str, ...]]] = {}
        for group in grouped(self.left):
            by_reason.setdefault(group[0].why, []).append(
                (f"    {_names(group)}", _fit(_brief(group[0].was), WIDTH - _NAME - 6))
            )
        for why, body in by_reason.items():
            lines += ["", *wrap(f"left: {why}", WIDTH, subsequent_indent="      "), *_table((), body, left=2)]
        if self.exact:
            body = [(_fit(x.where, _NAME), _fit(x.op, _OP), _size(x.saved), x.remedy) for x in self.exact]
            lines += ["", *_table(("exact: forward of", "saves for", "bytes", "what helps"), body, left=2)]
        for note in self.notes:
            lines += ["", *wrap(note, WIDTH)]
        return "\n".join(lines)

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


def _replaced_lines(rows: Sequence[Replaced]) -> list[str]:
    """Return the table of replaced modules, whose texts have the room that the other columns leave."""
    groups, heads = grouped(rows), ("name", "module", "table error", "saved")
    errors = ("" if math.isnan(group[0].error) else f"{group[0].error:.3g}" for group in groups)
    others = [(_names(group), error, _size(group[0].saved)) for group, error in zip(groups, errors, strict=True)]
    columns_of_others = zip((heads[0], *heads[2:]), zip(*others, strict=True), strict=True)
    taken = sum(max(map(len, (head, *cells))) + 2 for head, cells in columns_of_others if any(cells))
    body = []
    for group, (name, error, size) in zip(groups, others, strict=True):
        first, *more = wrap(_change(group[0]), max(_MODULE, WIDTH - taken), subsequent_indent="  ")
        body += [(name, first, error, size), *(("", line, "", "") for line in more)]
    return _table(heads, body, left=2)


def _table(heads: Sequence[str], body: Sequence[tuple[str, ...]], left: int) -> list[str]:
    """Return rows in columns, without those that are empty, under `heads` if there are any."""
    kept = [i for i in range(len(body[0])) if any(row[i] for row in body)]
    rows = [*([heads] if heads else []), *body]
    return [*columns([[row[i] for i in kept] for row in rows], left=left)]


def _change(row: Replaced) -> str:
    """Return what became of a module: Conv2d(16, 32, k3) → 4 bits."""
    was, now, saver = _brief(row.was), _brief(_SAVER.sub("", row.now)), _SAVER.search(row.now)
    if math.isnan(row.bits):
        return f"{was} → {saver[1] if saver else now}"
    bits = f"{row.bits:.3g} bit{'' if row.bits == 1 else 's'}{f' by {saver[1]}' if saver else ''}"
    return f"{was} → {bits if now.partition('(')[0] == was.partition('(')[0] else f'{now}, {bits}'}"


_SAVER = re.compile(r"saver=([\w-]+)(?:\([^()]*\))?")


def _brief(text: str) -> str:
    """Return the repr of a module, or of several in a row, by what tells it from others: Conv2d(16, 32, k3, s2)."""
    return re.sub(r"([\w.]+)(\((?:[^()]|\([^()]*\))*\))?", _brief_of_one, text)


def _brief_of_one(found: re.Match[str]) -> str:
    name, arguments = found[1].removeprefix("layers."), found[2]
    parts = []
    for key, value in re.findall(r"\s*(?:(\w+)=)?(\([^()]*\)|[^,()]+)", arguments[1:-1] if arguments else ""):
        if key in _SIZES or not key:
            parts.append(value.strip())
        elif key in _LETTERS:
            sizes = value.strip("()").replace(",", " ").split()
            short = "×".join(sizes if len({*sizes}) > 1 else sizes[:1])
            if short != "1":
                parts.append(_LETTERS[key] + short)
        elif key not in _UNSAID and value not in ("'none'", "False"):
            parts.append(f"{key}={value}")
    return f"{name}({', '.join(filter(None, parts))})" if parts else name


_SIZES = ("in_features", "out_features", "num_parameters")
_LETTERS = {"kernel_size": "k", "stride": "s", "groups": "g"}
_UNSAID = frozenset(
    (
        *("bias", "eps", "momentum", "affine", "elementwise_affine", "track_running_stats", "inplace"),
        *("padding", "padding_mode", "output_padding", "dilation", "bits", "rounding", "copy_bits"),
    )
)


def _fit(text: str, size: int) -> str:
    """Return a text without its middle, if it is too long."""
    return text if len(text) <= size else f"{text[: (size - 1) // 2]}…{text[len(text) - size // 2 :]}"


def _size(saved: int | None) -> str:
    return "" if saved is None else size_text(saved)


def _names(group: Sequence[Row]) -> str:
    if len(group) == 1:
        return _fit(group[0].name, _NAME) or "(the model)"
    count = f" ×{len(group)}"
    return _fit(_pattern(group[0].name), _NAME - len(count)) + count


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
