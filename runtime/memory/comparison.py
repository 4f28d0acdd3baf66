"""The same forward pass with exact activations and with few-bit ones, side by side."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.table import check_bits
from ..conversion import Report
from ..convert import convert, revert
from ..few_bit import few_bit
from ..resolve import DEFAULT_BITS
from .listing import Field, Sort, listing, share, size_text
from .record import profile
from .saved import Profile


@dataclass(frozen=True)
class Comparison:
    """What one forward pass keeps with exact activations (`before`) and with few-bit ones (`after`).

    `str(comparison)` is a table by module, and a line that sums it up.

    Attributes:
        bits: what few-bit activations keep for an element.
        before, after: the two profiles.
        report: which activations were replaced, and which were not and why.
    """

    bits: int
    before: Profile
    after: Profile
    report: Report

    @property
    def saved(self) -> int:
        """Bytes that the few-bit activations save; below 0 if they cost memory.

        They can: where another op keeps the output of an activation anyway, as a convolution keeps its input, torch's
        ReLU costs nothing, and the code of a few-bit one comes on top.
        """
        return self.before.total - self.after.total

    @property
    def nonlinear(self) -> int:
        """Bytes that the replaced activations themselves keep while they are exact."""
        return sum(s.bytes for s in self.before.saved if s.module in {r.name for r in self.report.replaced})

    def by(self, *fields: Field) -> dict[tuple[str, ...], tuple[int, int]]:
        """Return the bytes before and after for each combination of `fields`, in the order of saving."""
        before, after = self.before.by(*fields), self.after.by(*fields)
        return {key: (before.get(key, 0), after.get(key, 0)) for key in {**before, **after}}

    def table(self, *fields: Field, sort: Sort = "order", limit: int | None = None) -> str:
        """Return rows of `fields` with their bytes before and after, totals below, and a summary.

        Args:
            fields: the columns, "module" if none is named; storages that agree in all of them make one row.
            sort: "order" of saving, "bytes" (largest before first) or "name".
            limit: show so many rows, and sum up the rest in one.
        """
        fields = fields or ("module",)
        heads = ("exact", f"{self.bits} bits", "saved")
        rows = listing(self.by(*fields), fields, heads, lambda row, _: share(row[0] - row[1], row[0]), sort, limit)
        return f"{rows}\n\n{self.summary()}"

    def summary(self) -> str:
        """Return one line: bytes before and after, and what that saves."""
        before, after = self.before.total, self.after.total
        what = "saved" if self.saved >= 0 else "more"
        return (
            f"{size_text(before)} with exact activations, {size_text(after)} with {self.bits}-bit ones: "
            f"{size_text(abs(self.saved))} ({share(abs(self.saved), before)}) {what}"
        )

    def __str__(self) -> str:
        return self.table()


def compare(
    model: nn.Module, *inputs: object, bits: int = DEFAULT_BITS, functions: bool = False, **keywords: object
) -> Comparison:
    """Run `model(*inputs, **keywords)` with exact activations and again with few-bit ones; return what each keeps.

    The model stays as it is: a copy of its modules, which has the same parameters and buffers, is converted. What
    `profile` says of the meta device and of fake tensors holds here too.

    Args:
        model: any module that `fewbit.convert` takes; if it was converted before, `before` is that of the original.
        inputs: of the model.
        bits: 1 to 8, kept for each element of an activation's input.
        functions: catch activations that are called as functions too, as `fewbit.few_bit` does.
        keywords: of the model.

    Raises:
        FewbitError: `bits` is out of range, or the model cannot be converted.
    """
    return compare_each(model, *inputs, bits=(bits,), functions=functions, **keywords)[0]


def compare_each(
    model: nn.Module, *inputs: object, bits: Iterable[int], functions: bool = False, **keywords: Any
) -> list[Comparison]:
    """Return what `compare` returns for each number of `bits`; exact activations run once for all."""
    numbers = [check_bits(b) for b in bits]
    twin = revert(_with_the_same_tensors(model))
    before = profile(twin, *inputs, **keywords)
    result = []
    for b in numbers:
        report = convert(twin, b)
        twin = report.model  # another one, where the model itself is an activation
        with few_bit(b) if functions else nullcontext():
            after = profile(twin, *inputs, **keywords)
        result.append(Comparison(b, before, after, report))
    return result


def _with_the_same_tensors(model: nn.Module) -> nn.Module:
    tensors: Mapping[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, dict(tensors))
    except (RuntimeError, TypeError) as error:
        raise FewbitError(f"the model cannot be copied, so convert it and profile it yourself: {error}") from error
