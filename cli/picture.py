"""Conversion of the compiler's results to the input of the figures."""

from collections.abc import Sequence

from ..fewbit_gen import Activation, Weight
from ..plots import Approximated
from ..tables import Table


def approximated(activation: Activation, weight: Weight, tables: Sequence[Table]) -> Approximated:
    """Return `tables` with their derivative and weight, ready to be drawn."""
    return Approximated(activation.name, activation.derivative, weight.domain, tables, activation.kinks, weight.density)
