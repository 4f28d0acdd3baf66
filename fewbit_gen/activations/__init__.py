"""Activations, and how they are read.

smooth.py, piecewise.py   the families known by name, with their analytic derivatives
registry.py               softplus(beta=2)                     a family called by name
expression.py             x*sigmoid(1.702*x)                   an expression, differentiated by the chain rule
callables.py              torch.nn.Mish(), or f with f'        a Python callable
kinks.py                  where such a derivative is not smooth
parse.py                  which of these it is
"""

from .base import Activation, times_power_of_two
from .parse import as_activation, parse_activation
from .registry import EXAMPLES, FAMILIES, activation_name

__all__ = [
    "EXAMPLES",
    "FAMILIES",
    "Activation",
    "activation_name",
    "as_activation",
    "parse_activation",
    "times_power_of_two",
]
