"""Text in aligned columns."""

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

WIDTH = 100  # characters of a line of a report
_NARROWEST = 12  # characters to which a column of names is cut, if lines are still too long


def columns(rows: Sequence[Sequence[str]], left: int, most: int | None = None) -> Iterable[str]:
    """Yield rows as aligned columns: the first `left` cells flush left, the others flush right.

    Args:
        rows: of as many cells each.
        left: number of columns of names.
        most: characters of a line. The widest columns of names are cut until lines fit: ends of names tell them apart,
            as in …self_attn.q_proj.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    while most is not None and sum(widths) + 2 * (len(widths) - 1) > most and max(widths[:left]) > _NARROWEST:
        widths[widths.index(max(widths[:left]))] -= 1
    for row in rows:
        row = [cell if len(cell) <= width else f"…{cell[1 - width :]}" for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def wrapped_sizes(text: str) -> list[str]:
    """Return text as indented lines of `WIDTH` characters at most, with each size on the line of its unit."""
    kept_together = re.sub(r"(?<=\d) (?=[KMGT]?i?B\b)", "\N{NO-BREAK SPACE}", text)
    lines = wrap(kept_together, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
