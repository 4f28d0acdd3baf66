"""Text in aligned columns."""

from collections.abc import Iterable, Sequence


def columns(rows: Sequence[Sequence[str]], left: int) -> Iterable[str]:
    """Yield rows as aligned columns: the first `left` cells flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
