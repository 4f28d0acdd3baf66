"""The largest batch that a memory holds, by the formula of *Few-bit Backward* (Section 2 and Appendix B).

Training holds a few copies of the model (weights, gradients, the two moments of Adam: four in the paper) and, for
every sample of the batch, what the ops keep for backward. The part of that which pointwise activations keep has
elements of 32 bits (or fewer in half precision); in the place of each a few-bit activation keeps a code.
"""

import math
from dataclasses import dataclass

from ...tables import FewbitError

COPIES = 4  # weights, gradients and the two moments of Adam


@dataclass(frozen=True)
class Footprint:
    """What training one model takes; all in the same unit, bytes unless the user's own is another.

    Attributes:
        model: one copy of the parameters.
        activations: all that is kept for backward, for each sample.
        nonlinear: the part of it that pointwise activations keep exactly and few-bit ones in bits.
        element_bits: size of an element of that part.
        fixed: what is kept for backward whatever the batch is.
    """

    model: float
    activations: float
    nonlinear: float
    element_bits: int = 32
    fixed: float = 0.0

    def with_bits(self, bits: int | None) -> float:
        """Return what is kept for backward for each sample with codes of `bits` bits; exact if None."""
        if bits is None:
            return self.activations
        return self.activations - self.nonlinear * (1 - bits / self.element_bits)

    def largest_batch(self, memory: float, bits: int | None = None, copies: int = COPIES) -> int:
        """Return the largest batch that trains in `memory`, 0 if not one sample does. See `largest_batch`."""
        return largest_batch(memory, self.model, self.with_bits(bits), copies=copies, fixed=self.fixed)


def largest_batch(memory: float, model: float, per_sample: float, *, copies: int = COPIES, fixed: float = 0.0) -> int:
    """Return ⌊(memory − copies · model − fixed) / per_sample⌋, or 0 if that is negative.

    Args:
        memory: of the device, in bytes.
        model: bytes of the parameters.
        per_sample: bytes kept for backward for each sample of the batch.
        copies: how many times the parameters are held: weights, gradients and the optimizer's states.
        fixed: bytes kept for backward whatever the batch is.

    Raises:
        FewbitError: a sample keeps nothing, so that any batch would do.
    """
    if not per_sample > 0:
        raise FewbitError("a sample keeps nothing for backward: there is no largest batch")
    return max(0, math.floor((memory - copies * model - fixed) / per_sample))
