"""Sizes in rows and columns: the tables of profiles and comparisons."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from ...tables import FewbitError
from ...tables.columns import columns

Field = Literal["module", "kind", "op", "dtype"]
Sort = Literal["order", "bytes", "name"]
FIELDS: tuple[Field, ...] = get_args(Field)
SORTS: tuple[Sort, ...] = get_args(Sort)

Key = tuple[str, ...]
Sizes = tuple[int, ...]


def listing(
    rows: Mapping[Key, Sizes],
    fields: Sequence[Field],
    heads: Sequence[str],
    last: Callable[[Sizes, Sizes], str],
    sort: Sort,
    limit: int | None,
) -> str:
    """Return a line for each row, its key under `fields` and its bytes under `heads`, and the totals below.

    Args:
        rows: in the order of saving.
        fields: names of the parts of the keys.
        heads: names of the sizes, and of the last column.
        last: text of the last column, from the sizes of a row and the totals.
        sort: "order" as given, "bytes" (by the first size, largest first) or "name" (by the keys).
        limit: most rows to show; the rest is summed up in one row.

    Raises:
        FewbitError: `sort` is not "order", "bytes" or "name", or `limit` is below 1.
    """
    if sort not in SORTS:
        raise FewbitError(f"no sort {sort!r}; there are {', '.join(SORTS)}")
    if limit is not None and limit < 1:
        raise FewbitError(f"limit must be at least 1, not {limit}")
    unnamed = ["(the model)" if field == "module" else "" for field in fields]  # what its own forward calls
    items = [
        (tuple(part or whole for part, whole in zip(key, unnamed, strict=True)), sizes) for key, sizes in rows.items()
    ]
    if sort != "order":
        items.sort(key=(lambda item: -item[1][0]) if sort == "bytes" else (lambda item: item[0]))
    count = len(heads) - 1
    totals = _sums([sizes for _, sizes in items], count)
    shown, rest = items[:limit], items[len(items) if limit is None else limit :]
    blank = [""] * (len(fields) - 1)
    if rest:
        shown.append(((f"({len(rest)} more)", *blank), _sums([sizes for _, sizes in rest], count)))
    body = [(*key, *(f"{size:,}" for size in sizes), last(sizes, totals)) for key, sizes in shown]
    final = ("total", *blank, *(f"{size:,}" for size in totals), last(totals, totals))
    return "\n".join(columns([(*fields, *heads), *body, final], left=len(fields)))


def check_fields(fields: Sequence[str]) -> None:
    """Raise FewbitError if one of `fields` is not in `FIELDS`."""
    for field in fields:
        if field not in FIELDS:
            raise FewbitError(f"no field {field!r}; there are {', '.join(FIELDS)}")


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` as a percentage; "" if `whole` is 0."""
    return f"{part / whole:.1%}" if whole else ""


def size_text(size: float) -> str:
    """Return bytes with a unit: 1.5 GiB, 12.0 MiB, 512 B.

    Example:
        fewbit.memory.size_text(1536) == "1.5 KiB"
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _sums(rows: Sequence[Sizes], count: int) -> Sizes:
    return tuple(sum(sizes[i] for sizes in rows) for i in range(count))
