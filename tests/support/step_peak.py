"""The memory that a step really takes: all that torch's allocator gives, also within operations."""

import gc

import torch
from fewbit.runtime.memory.allocator import allocations


def measured_peak(model, inputs):
    """Return the peak of a step, without parameters and the optimizer's state."""
    for p in model.parameters():
        p.grad = None
    gc.collect()

    def step():
        output = model(**inputs)
        output["loss"].backward()

    return allocations(step, torch.device("cpu")).peak
