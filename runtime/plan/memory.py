"""What training keeps in memory, by module and by op, exact and few-bit, and how large a batch that leaves room for.

    profile(model, *inputs)          what one forward pass keeps for backward
    profile_call(model, call)        the same for a call that goes on to a loss
    compare(model, *inputs, bits=3)  the same as the model is and by a method of `convert`; the peaks beside
    peak_of_step(model, *inputs)     the most memory that a forward and a backward pass hold at once
    as_on_gpu()                      a block in which dropout and attention keep what they keep on a GPU
    need_of(model, runs)             what training takes, exact and few-bit; .largest_batch(memory, bits)
    largest_batch(...)               the paper's formula

All of them run on real tensors, on the meta device and on fake tensors, with the same bytes.
"""

from ..memory.listing import size_text
from ..memory.on_gpu import as_on_gpu
from ..memory.peak import Peak, peak_of, peak_of_step
from ..memory.record import profile, profile_call
from ..memory.saved import Profile, Saved
from .capacity import BITS, Kept, Need, largest_batch, need_by_formula, need_of, parameter_bytes
from .comparison import Comparison, compare, compare_each, method_text

__all__ = [
    "BITS",
    "Comparison",
    "Kept",
    "Need",
    "Peak",
    "Profile",
    "Saved",
    "as_on_gpu",
    "compare",
    "compare_each",
    "largest_batch",
    "method_text",
    "need_by_formula",
    "need_of",
    "parameter_bytes",
    "peak_of",
    "peak_of_step",
    "profile",
    "profile_call",
    "size_text",
]
