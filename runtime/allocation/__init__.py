"""Allocation of bits to each sample of each layer (ActNN, Sections 4.2 and 4.3).

allocate             solves Prob. (10) by the greedy rule, with a bound on the error
allocate_exactly     the same by dynamic programming
MixedPrecision       applies it in training: sensitivities, gradients, iterations
"""

from .greedy import allocate, allocate_exactly
from .mixed_precision import MixedPrecision
from .problem import variance

__all__ = ["MixedPrecision", "allocate", "allocate_exactly", "variance"]
