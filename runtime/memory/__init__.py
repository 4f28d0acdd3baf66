"""What training keeps in memory, by module and by op, exact and few-bit, and how large a batch that leaves room for.

    profile(model, *inputs)          what one forward pass keeps for backward
    profile_call(model, call)        the same for a call that goes on to a loss
    compare(model, *inputs, bits=3)  the same with exact activations and with few-bit ones
    largest_batch(...)               the paper's formula

All of them run on real tensors, on the meta device and on fake tensors, with the same bytes.
"""

from .capacity import Footprint, largest_batch
from .record import profile, profile_call
from .saved import Profile, Saved

__all__ = [
    "Footprint",
    "Profile",
    "Saved",
    "largest_batch",
    "profile",
    "profile_call",
]
