"""From the user's arguments (an activation, bits, perhaps a table) to the key of a registered table.

Only here does the runtime call the compiler: for an activation without a shipped table, such as Softplus(beta=5).
"""

from functools import cache

import torch

from ...tables import DEFAULT_WEIGHT, FewbitError, Table
from ...tables.shipped import find_table
from ...tables.table import check_bits
from ..backends.forwards import forward_of
from ..tensors.table_registry import register_table

DEFAULT_BITS = 3
DEFAULT_KIND = "shared"


def resolve_table(
    function: str, parameters: tuple[float, ...], bits: int | None = None, table: Table | None = None
) -> Table:
    """Return the table to use for torch's `function` with `parameters`.

    Args:
        function: a name in `FORWARDS`.
        parameters: values of its parameters, in their order.
        bits: 1 to 8; 3 if neither this nor `table` is given.
        table: used as it is. It may be of any activation: that is the user's choice.

    Raises:
        FewbitError: bits and table contradict each other, or an argument is out of range.
    """
    if table is None:
        return _default_table(function, parameters, check_bits(DEFAULT_BITS if bits is None else bits))
    if not isinstance(table, Table):
        raise FewbitError(f"table must be a fewbit.Table, not {type(table).__name__}; read one with Table.from_json")
    if bits is not None and table.bits > check_bits(bits):
        raise FewbitError(f"the table takes {table.bits} bits, more than bits={bits}; leave bits out")
    return table


@torch.compiler.assume_constant_result
def resolve_key(
    function: str, parameters: tuple[float, ...], bits: int | None = None, table: Table | None = None
) -> str:
    """Return the key under which the table of `resolve_table` is registered."""
    return register_table(resolve_table(function, parameters, bits, table))


@cache
def _default_table(function: str, parameters: tuple[float, ...], bits: int) -> Table:
    name = forward_of(function).activation_name(function, parameters)
    shipped = find_table(name, bits, DEFAULT_KIND, DEFAULT_WEIGHT)
    if shipped is not None:
        return shipped
    from ...fewbit_gen import parse_activation, parse_weight
    from ...fewbit_gen.library import find_or_solve

    weight = parse_weight(DEFAULT_WEIGHT)
    return find_or_solve(parse_activation(name), bits, DEFAULT_KIND, weight, certify=False)  # not needed to train
