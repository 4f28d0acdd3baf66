"""From what the compiler knows to what the figures take."""

from collections.abc import Sequence

from ..fewbit_gen import Activation, Weight
from ..plots import Approximated
from ..tables import Table


def approximated(activation: Activation, weight: Weight, tables: Sequence[Table]) -> Approximated:
    """Return `tables` with the derivative and the weight that they were solved for, ready to be drawn."""
    return Approximated(activation.name, activation.derivative, weight.domain, tables, activation.kinks, weight.density)
