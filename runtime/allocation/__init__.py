"""How many bits each sample of each layer gets (ActNN, Sections 4.2 and 4.3).

allocate             Prob. (10) by the greedy rule, with a bound that tells how good it is
allocate_exactly     the same by dynamic programming
MixedPrecision       what a training does with it: sensitivities, gradients, iterations
"""

from .exact import allocate_exactly
from .greedy import allocate
from .mixed_precision import MixedPrecision
from .problem import variance

__all__ = ["MixedPrecision", "allocate", "allocate_exactly", "variance"]
