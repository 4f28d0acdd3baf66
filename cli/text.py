"""Tables as text. ASCII only, so that any terminal and pipe can show it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..tables import Table
from ..tables.columns import columns
from ..tables.names import counted


def table_text(
    table: Table,
    seconds: float | None = None,
    uniform: float | None = None,
    covers: tuple[float, float] | None = None,
) -> str:
    """Return a table as lines: a description, its error, then one row per interval.

    Args:
        table: the table.
        seconds: the solving time, if it was solved just now.
        uniform: of kind ``stochastic``, the error of as many levels at equal distances.
        covers: of kind ``stochastic``, the interval of x on which it is without bias.
    """
    # Intervals are open on the left and closed on the right; the last one is unbounded.
    ends = ["-inf", *_numbers(table.boundaries), "inf"]
    levels = _numbers(table.levels)
    at_random = table.kind == "stochastic"
    head = ("", "above", "up to", "code", *(("level", "or level") if at_random else ("level",)))
    body = [
        ("", low, high, str(code), *levels[code : code + (2 if at_random else 1)])
        for low, high, code in zip(ends, ends[1:], table.codes.tolist(), strict=False)
    ]
    return "\n".join([*_heading(table, seconds, uniform, covers), "", *columns([head, *body], left=1)])


def list_text(tables: Sequence[Table]) -> str:
    """Return one line per activation, kind and weight, with the error at every number of bits."""
    bits = range(min(t.bits for t in tables), max(t.bits for t in tables) + 1)
    errors: dict[tuple[str, str, str], dict[int, str]] = {}
    for table in tables:
        row = errors.setdefault((table.activation, table.kind, table.weight), {})
        row[table.bits] = f"{table.error:.6f}" if table.error else "exact"
    head = ("activation", "kind", "weight", *(counted(b, "bit") for b in bits))
    body = [(*what, *(row.get(b, "") for b in bits)) for what, row in errors.items()]
    return "\n".join(columns([head, *body], left=3))


def _heading(
    table: Table, seconds: float | None, uniform: float | None, covers: tuple[float, float] | None
) -> list[str]:
    K = table.levels.size
    shape = f"{counted(table.bits, 'bit')}, {counted(K, 'level')}, {counted(table.codes.size, 'interval')}"
    lines = [
        f"{table.activation}: {shape}, kind {table.kind}, weight {table.weight}",
        f"error        {table.error:.9g}" + ("  (exact)" if table.error == 0 else ""),
    ]
    if table.lower_bound is None:
        lines.append("lower bound  not computed")
    elif table.error > 0:
        gap = (table.error - table.lower_bound) / table.error
        lines.append(f"lower bound  {table.lower_bound:.9g}  ({100 * gap:.2g} % below the error)")
    if uniform is not None:
        ratio = table.error / uniform
        lines.append(f"uniform      {uniform:.9g}  (levels at equal distances: the error is {ratio:.3g} of it)")
    if covers is not None:
        lines.append(f"covers       f' on [{covers[0]:g}, {covers[1]:g}]")
    if seconds is not None:
        lines.append(f"time         {seconds:.3g} s")
    return lines


def _numbers(values: NDArray[np.float64]) -> list[str]:
    """Return aligned numbers, with six decimals or as many more as needed to distinguish them."""
    largest = np.abs(values).max(initial=0.0)
    form = "f" if largest == 0 or 1e-3 <= largest < 1e7 else "e"
    texts: list[str] = []
    for decimals in range(6, 17):
        texts = [f"{value:.{decimals}{form}}" for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts
