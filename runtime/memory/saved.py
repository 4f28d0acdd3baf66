"""The result of a measurement: a row for each saved storage, sums by any of its fields, and a table."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .listing import FIELDS, Field, Sort, check_fields, listing, share


@dataclass(frozen=True)
class Saved:
    """One storage that an op saves for the backward pass.

    Attributes:
        module: qualified name of the innermost module whose forward saved it; "" for the model itself.
        kind: class name of that module.
        op: the op that saved it, by the name of its function (gelu, addmm, native_layer_norm); the class of a
            `torch.autograd.Function`; "checkpoint" for the inputs of a checkpoint; "?" if unknown.
        bytes: size of the storage, which may be larger than the tensor that was saved.
        dtype: of the tensor that was saved.
        line: file and line of the model's own code that called the op, "model.py:41"; "" if it has none.
    """

    module: str
    kind: str
    op: str
    bytes: int
    dtype: torch.dtype
    line: str = field(default="", compare=False)


@dataclass(frozen=True)
class Profile:
    """All storages that one forward pass saves for backward. `str(profile)` is a table of them.

    Attributes:
        saved: each storage once, under the module and op that saved it first, in that order.
        again: the same storages under the other ops that saved them too; these take no memory of their own, but
            compressing the storage for one op frees nothing while another op saves it.
    """

    saved: tuple[Saved, ...]
    again: tuple[Saved, ...] = ()

    @property
    def total(self) -> int:
        """Total bytes."""
        return _sum(self.saved)

    @property
    def total_by_each(self) -> int:
        """Bytes that would be saved if every op had its own copy."""
        return _sum(self.saved) + _sum(self.again)

    def by(self, *fields: Field) -> dict[tuple[str, ...], int]:
        """Return bytes for each combination of `fields` ("module", "kind", "op", "dtype"), in the order of saving.

        Raises:
            FewbitError: a field is not "module", "kind", "op" or "dtype".
        """
        check_fields(fields)
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
            limit: most rows to show; the rest is summed up in one row.

        Raises:
            FewbitError: `sort` or a field is not one of the values above, or `limit` is below 1.
        """
        rows = {key: (size,) for key, size in self.by(*(fields or FIELDS)).items()}
        return listing(rows, fields or FIELDS, ("bytes", "share"), lambda row, all: share(*row, *all), sort, limit)

    def __str__(self) -> str:
        return self.table()


def _text(value: str | torch.dtype) -> str:
    return value if isinstance(value, str) else str(value).removeprefix("torch.")


def _sum(saved: Iterable[Saved]) -> int:
    return sum(s.bytes for s in saved)
