"""The compiler: from an activation and a weight to the best few-bit table."""

from . import weights
from .activations import Activation, parse_activation
from .solver import solve
from .weights import Weight, parse_weight

__all__ = ["Activation", "Weight", "parse_activation", "parse_weight", "solve", "weights"]
