"""Tables as CSV: one row an interval, for spreadsheets and for `pandas.read_csv`."""

from ..table import Table


def csv_rows(table: Table) -> str:
    """Return the rows `above,up_to,code,level` of every interval, from −∞ to +∞, below a line of their names.

    A level that no interval has is not among them.
    """
    ends = ["-inf", *map(repr, table.boundaries.tolist()), "inf"]
    codes, levels = table.codes.tolist(), table.levels.tolist()
    rows = (f"{ends[i]},{ends[i + 1]},{code},{levels[code]!r}" for i, code in enumerate(codes))
    return "\n".join(["above,up_to,code,level", *rows]) + "\n"
