"""Numbers of bits: those that plans choose from, those that are measured, and the fewest that a tensor is given."""

from ..saved.exactness import OF_SCORES
from .trace import Traced

BITS = (1, 2, 3, 4, 5, 6, 8)
PROBE = 4  # at which tensors are measured
# Of groups that are turned, which have the error of one to two bits more: with everything in 2 bits small models ended
# .02 above exact training, in 3 bits as it (plots/results/two_bits.md).
ROTATED_BITS = (2, 3)
TABLE_BITS = (1, 2, 3, 4)
TABLE_PROBE = 3
# Least bits by the function that saves a tensor. A plan is measured at one moment, and what hardly matters to a fresh
# model may matter later: its attention is even, and queries in 1 bit do no harm. A GPT-2 of four layers planned at its
# first step without these ended 300 steps .53 above exact training's loss, at a predicted error of .006.
LEAST_LINEAR, LEAST_BITS, LEAST_OF_SCORES, LEAST_OF_TABLE = 3, 4, 6, 2
LINEAR = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"))


def least_bits(x: Traced) -> int:
    """Return the fewest bits that a plan gives a tensor."""
    if x.function in OF_SCORES:
        return LEAST_OF_SCORES
    return LEAST_LINEAR if x.function in LINEAR else LEAST_BITS
