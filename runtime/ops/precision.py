"""Mixed precision in compiled graphs: a `MixedPrecision` and its savers, given by their handles (tensors/graphs.py).

begin_iteration(iteration, precision)                       They learn of a forward pass, of x, of sharing the codes
allocate_bits(x, iteration, saver, group_size) -> bits, room    of `host`, and of the gradient.
share_bits(x, bits, saver, host) -> bits                    iteration, saver, host, room int64 (1,) on the CPU
observe(gradient, rstd, bits, saver) -> bits
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.graphs import by_handle
from .declare import ON_HOST, ONCE, Call, declare

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
