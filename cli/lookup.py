"""Tables for the commands that need a table and not a solver: shipped ones as they are, others solved."""

from ..fewbit_gen import Activation, Weight, solve
from ..tables import Table
from ..tables.shipped import find_table
from ..tables.table import check_bits, check_kind


def find_or_solve(
    activation: Activation, bits: int | None, kind: str, weight: Weight, levels: int | None = None
) -> Table:
    """Return the shipped table that solving would return or, where there is none, what `solve` returns."""
    shipped = _shipped(activation.name, bits, levels, check_kind(kind), weight.spec)
    return solve(activation, bits, kind, weight, levels=levels) if shipped is None else shipped


def _shipped(activation: str, bits: int | None, levels: int | None, kind: str, weight: str) -> Table | None:
    if levels is not None:
        if bits is not None or levels not in (2**b for b in range(1, 9)):
            return None  # the solver tells what is wrong with it, if anything
        bits = levels.bit_length() - 1
    return find_table(activation, check_bits(3 if bits is None else bits), kind, weight)
