"""Tables as CSV: one row an interval, for spreadsheets and for `pandas.read_csv`."""

from ..table import Table


def csv_rows(table: Table) -> str:
    """Return a header line and the rows `above,up_to,code,level` of every interval, from −∞ to +∞.

    Levels that no interval uses are left out.
    """
    ends = ["-inf", *map(repr, table.boundaries.tolist()), "inf"]
    codes, levels = table.codes.tolist(), table.levels.tolist()
    rows = (f"{ends[i]},{ends[i + 1]},{code},{levels[code]!r}" for i, code in enumerate(codes))
    return "\n".join(["above,up_to,code,level", *rows]) + "\n"
