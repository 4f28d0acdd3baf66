"""Activations: those known by name (smooth.py, piecewise.py, registry.py)."""

from .base import Activation
from .registry import FAMILIES, activation_name
from .registry import named_activation as parse_activation

__all__ = ["FAMILIES", "Activation", "activation_name", "parse_activation"]
