"""Ops that keep place, number and order in compiled graphs.

to_host(x) -> x                       a copy in pinned host memory
to_device_of(x, gradient) -> x        and back; by the gradient, compilers see that it is for the backward pass
another(x, first) -> x                a copy to be compressed once more, after `first`, by rounding of its own

begin_iteration(iteration, precision)                       A `MixedPrecision` and its savers, given by their handles
allocate_bits(x, iteration, saver, group_size) -> bits, room    (tensors/graphs.py), learn of a forward pass, of x, of
share_bits(x, bits, saver, host) -> bits                    sharing the codes of `host`, and of the gradient.
observe(gradient, rstd, bits, saver) -> bits                iteration, saver, host, room int64 (1,) on the CPU
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.graphs import by_handle
from .declare import ON_HOST, ONCE, Call, declare

# ---- copies ----------------------------------------------------------------------------------------------------------


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


# ---- mixed precision -------------------------------------------------------------------------------------------------

_STATEFUL = (*ON_HOST, ONCE)


@declare("begin_iteration(Tensor(a!) iteration, Tensor precision) -> ()", tags=ON_HOST)
def begin_iteration(iteration: Tensor, precision: Tensor) -> Call:
    """Count a forward pass."""

    def run(_: None) -> None:
        iteration.add_(1)
        if (found := by_handle(precision)) is not None:
            found.begin()

    return Call(fake=lambda: None, run=run)


@declare("allocate_bits(Tensor x, Tensor iteration, Tensor saver, int group_size) -> (Tensor, Tensor)", tags=_STATEFUL)
def allocate_bits(x: Tensor, iteration: Tensor, saver: Tensor, group_size: int) -> Call:
    """Return the bits of each sample, uint8 (N,), and the bytes that their codes take."""

    def run(_: None) -> Any:
        found = by_handle(saver)
        if found is None:
            raise FewbitError("a compiled model was converted back, or its precision removed: compile it again")
        return found.allocate(x, group_size)

    return Call(
        fake=lambda: (
            x.new_empty(x.shape[0], dtype=torch.uint8),
            torch.empty(1, dtype=torch.int64, device="cpu"),
        ),
        run=run,
    )


@declare("share_bits(Tensor x, Tensor bits, Tensor saver, Tensor host) -> Tensor", tags=_STATEFUL)
def share_bits(x: Tensor, bits: Tensor, saver: Tensor, host: Tensor) -> Call:
    """Return a copy of `bits`; the saver now shares the codes of `host`."""

    def run(_: None) -> Tensor:
        guest, owner = by_handle(saver), by_handle(host)
        if guest is not owner and guest is not None and owner is not None:
            guest.join(owner, x)
        return bits.clone()

    return Call(fake=lambda: torch.empty_like(bits), run=run)


@declare("observe(Tensor gradient, Tensor? rstd, Tensor bits, Tensor saver) -> Tensor", tags=_STATEFUL)
def observe(gradient: Tensor, rstd: Tensor | None, bits: Tensor, saver: Tensor) -> Call:
    """Return a copy of `bits`; the saver has seen the gradient."""

    def run(_: None) -> Tensor:
        if (found := by_handle(saver)) is not None:  # which may be gone since the forward pass
            found.observe(gradient, rstd)
        return bits.clone()

    return Call(fake=lambda: torch.empty_like(bits), run=run)
