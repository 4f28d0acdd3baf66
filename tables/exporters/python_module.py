"""Tables as a Python module that imports nothing but `bisect`."""

from ..table import Table
from .provenance import provenance
from .rows import rows

_TEMPLATE = '''"""A few-bit table of an activation's derivative: encode(x) gives the code, q(x) the value."""

{provenance}

from bisect import bisect_left

# Interval i is BOUNDARIES[i - 1] < x <= BOUNDARIES[i].
BOUNDARIES = (
{boundaries})
# The code of every interval, and the value of every code.
CODES = (
{codes})
LEVELS = (
{levels})


def encode(x):
    """Return the code of the number x; NaN belongs to the last interval."""
    return CODES[bisect_left(BOUNDARIES, x) if x == x else -1]


def q(x):
    """Return the table's value at the number x."""
    return LEVELS[encode(x)]
'''


def python_module(table: Table) -> str:
    """Return the text of the module: ``BOUNDARIES``, ``CODES``, ``LEVELS``, ``encode(x)`` and ``q(x)``."""
    return _TEMPLATE.format(
        provenance="\n".join(f"# {line}" for line in provenance(table)),
        boundaries=_rows(table.boundaries.tolist()),
        codes=_rows(table.codes.tolist()),
        levels=_rows(table.levels.tolist()),
    )


def _rows(values: list[float] | list[int]) -> str:
    """Return numbers in indented lines, a comma after each; empty text for an empty list."""
    numbers = " ".join(f"{value!r}," for value in values)
    return rows(numbers, 88, 4) + "\n" if values else ""
