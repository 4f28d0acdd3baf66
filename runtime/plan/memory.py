"""The memory of training, by module and by op, exact and few-bit, and the largest batch that fits.

    profile(model, *inputs)          the storages that one forward pass saves for backward
    profile_call(model, call)        the same for a call that also computes a loss
    compare(model, *inputs, bits=3)  the model unchanged against a method of `convert`: saved storages and peaks
    peak_of_step(model, *inputs)     the peak memory of a forward and a backward pass
    timeline_of_step(model, *inputs) the memory at each of their moments, and which module runs then
    as_on_gpu()                      a context in which dropout and attention save what they save on a GPU
    need_of(model, runs)             the memory of training, exact and few-bit; .largest_batch(memory, bits)
    largest_batch(...)               the paper's formula
    return_freed_memory()            on a CPU: what is freed goes back to the system at once

Those of models run on real tensors, on the meta device and on fake tensors, with the same bytes.
"""

from ..memory.listing import size_text
from ..memory.malloc import return_freed_memory
from ..memory.on_gpu import as_on_gpu
from ..memory.peak import Peak, peak_of, peak_of_step
from ..memory.record import profile, profile_call
from ..memory.saved import Profile, Saved
from ..memory.timeline import Mark, Timeline, timeline_of_step
from .capacity import BITS, Kept, Need, largest_batch, need_by_formula, need_of, parameter_bytes
from .comparison import Comparison, compare, compare_each, method_text

__all__ = [
    "BITS",
    "Comparison",
    "Kept",
    "Mark",
    "Need",
    "Peak",
    "Profile",
    "Saved",
    "Timeline",
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
    "return_freed_memory",
    "size_text",
    "timeline_of_step",
]
