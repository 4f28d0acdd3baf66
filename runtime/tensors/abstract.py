"""Tensors without values: those of the meta device and fake ones, on which memory is counted and nothing computed.

A kernel works on such a tensor in registers of which nobody hears, where the reference in plain torch makes temporary
tensors. Within `scratch()` what is made does not count towards a peak of memory (memory/peak.py) unless it is alive at
the end, so that a method counts on abstract tensors as its kernels do.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class _Depth(threading.local):
    depth = 0


_scratch = _Depth()


def is_abstract(x: Tensor) -> bool:
    """Tell whether `x` has a shape, dtype and device, and no values."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_autocast(x: Tensor) -> bool:
    """Tell whether autocast is on for the device of `x`; the meta device has none."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@contextmanager
def scratch() -> Iterator[None]:
    """Mark the operations of this block as those of one kernel: its temporary tensors take no memory."""
    _scratch.depth += 1
    try:
        yield
    finally:
        _scratch.depth -= 1


def in_scratch() -> bool:
    """Tell whether a block of `scratch` is running in this thread."""
    return _scratch.depth > 0
