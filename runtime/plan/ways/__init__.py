"""Ways to save memory, a file each: what they do to the gradient, hold and cost, and how they are carried out.

Ways to save tensors (known.py) are options of one problem. A new one needs its line in `WAYS_TO_SAVE`, its method in
problem.py and its words in document.py. Ways to compute a step change its memory as a whole, each in a problem
of its own; a new one needs its line in `WAYS_OF_STEPS` and the same.
"""

from ..known import Way, WayToSave
from .attention import ComputedAttention
from .blocks import Blocks
from .chains import Chains
from .chunked_loss import ChunkedLossWay
from .float8 import Float8Operands
from .gated_mlps import GatedParts
from .outputs import Outputs
from .tables import Tables
from .tensors import Tensors
from .tiles import Tiles

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
# In the order in which they are tried, each beside those before it: what costs no time comes first.
WAYS_OF_STEPS: tuple[Way, ...] = (ChunkedLossWay(), Tiles())
