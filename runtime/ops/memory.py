"""Copies of tensors whose place or number a compiled graph must keep.

to_host(x) -> x                       a copy in pinned host memory
to_device_of(x, gradient) -> x        and back; by the gradient, compilers see that it is for the backward pass
another(x, first) -> x                a copy to be compressed once more, after `first`, by rounding of its own
"""

import torch
from torch import Tensor

from .declare import ON_HOST, Call, declare


@declare("to_host(Tensor x) -> Tensor", tags=ON_HOST)
def to_host(x: Tensor) -> Call:
    """Return a copy on the host; from a GPU pinned and not waited for: `to_device_of` reads it, on the same stream."""
    return Call(
        fake=lambda: torch.empty_like(x, device="cpu"),
        run=lambda _: torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda").copy_(x, non_blocking=True),
    )


@declare("to_device_of(Tensor x, Tensor gradient) -> Tensor", tags=ON_HOST)
def to_device_of(x: Tensor, gradient: Tensor) -> Call:
    """Return a copy on the device of `gradient`."""
    return Call(
        fake=lambda: torch.empty_like(x, device=gradient.device),
        run=lambda _: x.to(gradient.device, non_blocking=True, copy=True),
    )


@declare("another(Tensor x, Tensor first) -> Tensor")
def another(x: Tensor, first: Tensor) -> Call:
    """Return a copy of `x`."""
    return Call(fake=x.clone, run=lambda _: x.clone())
