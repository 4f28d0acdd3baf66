"""How many bits each sample of each layer gets (ActNN, Sections 4.2 and 4.3).

`allocate` solves Prob. (10) by the greedy rule with a proof of how good it is, `allocate_exactly` by dynamic
programming; they need NumPy and Numba alone.
"""

from .exact import allocate_exactly
from .greedy import allocate
from .problem import variance

__all__ = ["allocate", "allocate_exactly", "variance"]
