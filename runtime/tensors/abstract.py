"""Tensors without values, on the meta device or fake: used to count memory without computing.

Where a kernel works in registers, the reference in plain torch makes temporary tensors. Tensors made within `scratch()`
do not count towards a memory peak (memory/peak.py) unless they are alive at its end, so that a method counts on
abstract tensors what its kernels would take.
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
    """Return whether `x` has a shape, dtype and device, but no values."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of `x`; the meta device has none."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@contextmanager
def scratch() -> Iterator[None]:
    """Count the operations of this block as one kernel, whose temporary tensors take no memory."""
    _scratch.depth += 1
    try:
        yield
    finally:
        _scratch.depth -= 1


def in_scratch() -> bool:
    """Return whether a block of `scratch` is running in this thread."""
    return _scratch.depth > 0
