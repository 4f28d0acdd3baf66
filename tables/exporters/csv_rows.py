"""Tables as CSV: one row an interval, for spreadsheets and for `pandas.read_csv`."""

from ..table import Table


def csv_rows(table: Table) -> str:
    """Return a header line and the rows `above,up_to,code,level` of every interval, from −∞ to +∞.

    Levels that no interval uses are left out. Rows of kind ``stochastic`` end with the other level, `or_level`.
    """
    ends = ["-inf", *map(repr, table.boundaries.tolist()), "inf"]
    codes, levels = table.codes.tolist(), table.levels.tolist()
    more, other = "", [""] * len(levels)
    if table.kind == "stochastic":
        more, other = ",or_level", [f",{level!r}" for level in (*levels[1:], levels[-1])]
    rows = (f"{ends[i]},{ends[i + 1]},{code},{levels[code]!r}{other[code]}" for i, code in enumerate(codes))
    return "\n".join([f"above,up_to,code,level{more}", *rows]) + "\n"
