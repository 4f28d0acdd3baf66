"""Ways to save memory: what they do to the gradient, hold and cost, and how they are carried out.

Ways to save tensors (known.py) are options of one problem. A new one needs its line in `WAYS_TO_SAVE`, its method in
problem.py and its words in document.py. Ways to compute a step (steps.py) change its memory as a whole, each in a
problem of its own; a new one needs its line in `WAYS_OF_STEPS` and the same.
"""

from ..known import WayToSave
from .blocks import Blocks
from .chains import Chains
from .modules import GatedParts, Outputs, Tables
from .tensors import ComputedAttention, Float8Operands, Tensors

WAYS_TO_SAVE: tuple[WayToSave, ...] = (
    Tensors(),
    Float8Operands(),
    Tables(),
    ComputedAttention(),
    GatedParts(),
    Outputs(),
    Chains(),
    Blocks(),
)
