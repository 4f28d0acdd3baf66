"""What was measured, and how it reads: a row for each storage, sums by whatever the reader asks for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ...tables import FewbitError
from ...tables.columns import columns

Field = Literal["module", "kind", "op", "dtype"]
Sort = Literal["order", "bytes", "name"]
SORTS: tuple[Sort, ...] = get_args(Sort)


@dataclass(frozen=True)
class Saved:
    """One storage that an op keeps for the backward pass.

    Attributes:
        module: qualified name of the innermost module whose forward saved it; "" for the model itself.
        kind: class name of that module.
        op: the op that saved it, named as its function is (gelu, addmm, native_layer_norm); for a
            `torch.autograd.Function` its class, for the inputs of a checkpoint "checkpoint"; "?" if nothing tells.
        bytes: size of the storage, which may be larger than the tensor that was saved.
        dtype: of the tensor that was saved.
    """

    module: str
    kind: str
    op: str
    bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Profile:
    """All that one forward pass keeps for backward. `str(profile)` is a table of it.

    Attributes:
        saved: each storage once, under the module and op that saved it first, in that order.
        again: the same storages under the other ops that saved them too; these take no memory of their own, but
            compressing what one op keeps frees nothing as long as another keeps it.
    """

    saved: tuple[Saved, ...]
    again: tuple[Saved, ...] = ()

    @property
    def total(self) -> int:
        """Bytes in all."""
        return _sum(self.saved)

    @property
    def total_by_each(self) -> int:
        """Bytes that would be kept if every op had a copy of its own; the paper counts so."""
        return _sum(self.saved) + _sum(self.again)

    def by(self, *fields: Field) -> dict[tuple[str, ...], int]:
        """Return bytes for each combination of `fields` ("module", "kind", "op", "dtype"), in the order of saving."""
        result: dict[tuple[str, ...], int] = {}
        for s in self.saved:
            key = tuple(_text(getattr(s, field)) for field in fields)
            result[key] = result.get(key, 0) + s.bytes
        return result

    def by_module(self) -> dict[str, int]:
        """Return bytes for each module that saved anything, in order."""
        return {module: size for (module,), size in self.by("module").items()}

    def by_op(self) -> dict[str, int]:
        """Return bytes for each op that saved anything, in order."""
        return {op: size for (op,), size in self.by("op").items()}

    def of_kind(self, kind: str) -> int:
        """Return the bytes that modules of the class name `kind` saved."""
        return _sum(s for s in self.saved if s.kind == kind)

    def table(self, *fields: Field, sort: Sort = "order", limit: int | None = None) -> str:
        """Return rows of `fields` (all four if none is named) with their bytes and share, and the total below.

        Args:
            fields: the columns; storages that agree in all of them make one row.
            sort: "order" of saving, "bytes" (largest first) or "name" (by the fields).
            limit: show so many rows, and sum up the rest in one.

        Raises:
            FewbitError: `sort` or a field is none of these, or `limit` is below 1.
        """
        unknown = [field for field in fields if field not in get_args(Field)]
        if unknown or sort not in SORTS:
            raise FewbitError(
                f"no {unknown[0] if unknown else sort!r}: the fields are {', '.join(get_args(Field))}, "
                f"the sorts {', '.join(SORTS)}"
            )
        if limit is not None and limit < 1:
            raise FewbitError(f"limit must be at least 1, not {limit}")
        fields = fields or get_args(Field)
        rows = sort_rows(self.by(*fields), sort)
        shown, rest = rows[:limit], rows[len(rows) if limit is None else limit :]
        if rest:
            shown.append(((f"{len(rest)} more", *[""] * (len(fields) - 1)), sum(size for _, size in rest)))
        total = self.total
        body = [(*key, f"{size:,}", f"{size / total:.1%}") for key, size in shown]
        last = ("total", *[""] * (len(fields) - 1), f"{total:,}", "")
        return "\n".join(columns([(*fields, "bytes", "share"), *body, last], left=len(fields)))

    def __str__(self) -> str:
        return self.table()


def sort_rows(rows: dict[tuple[str, ...], int], sort: Sort) -> list[tuple[tuple[str, ...], int]]:
    """Return the rows in the order of `sort`; equals stay in the order of saving."""
    items = list(rows.items())
    if sort == "bytes":
        return sorted(items, key=lambda item: -item[1])
    return sorted(items, key=lambda item: item[0]) if sort == "name" else items


def size_text(size: float) -> str:
    """Return bytes as people read them: 1.5 GiB, 12.0 MiB, 512 B."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.1f} TiB"


def _text(value: str | torch.dtype) -> str:
    return value if isinstance(value, str) else str(value).removeprefix("torch.")


def _sum(saved: Iterable[Saved]) -> int:
    return sum(s.bytes for s in saved)
