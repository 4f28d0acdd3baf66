"""Activations and their notations.

smooth.py, piecewise.py   the named families, with their analytic derivatives
registry.py               softplus(beta=2)                     a call of a named family
syntax.py                 what an expression consists of, and the one walk through it
expression.py             x*sigmoid(1.702*x)                   an expression, read and differentiated by the chain rule
enclosure.py              bounds of its derivative on intervals
callables.py              torch.nn.Mish(), or f with f'        a Python callable
kinks.py                  detection of points where such a derivative is not smooth
parse.py                  selects among these notations
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
