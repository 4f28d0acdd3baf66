"""Attention with dropout, whose backward pass draws the same mask again from the generator's saved state.

y, state = forward(q, k, v, mask, p, is_causal, scale, enable_gqa)
gradient(grad, q, k, v, mask, state, wanted, p, is_causal, scale, enable_gqa)
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ...tensors.traits import without_autocast


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None, gqa: bool
) -> tuple[Tensor, Tensor]:
    """Return torch's attention and the state of the generator before it."""
    state = random_state(q.device)
    y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=gqa)
    return y, state


def gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    wanted: Sequence[bool],
    p: float,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> list[Tensor]:
    """Return torch's gradients of those of q, k and v that are `wanted`, in the dtype of `grad`.

    Args:
        grad: of the output.
        q, k, v, mask, p, is_causal, scale, gqa: as in the forward pass; q, k and v of any floating-point dtype.
        state: of the generator, before the forward pass; None without dropout.
        wanted: whether each of q, k and v needs a gradient.
    """
    if mask is not None and mask.is_floating_point():
        mask = mask.to(grad.dtype)
    q, k, v = (x.detach().to(grad.dtype) for x in (q, k, v))
    leaves = [x for x, w in zip((q, k, v), wanted, strict=True) if w]
    with torch.enable_grad(), without_autocast(grad), _replayed(state, grad.device), _recomputing():
        for x in leaves:
            x.requires_grad_()
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=gqa)
    return list(torch.autograd.grad(y, leaves, grad))


class _Recomputing(threading.local):
    now: bool = False


_thread = _Recomputing()


def is_recomputing() -> bool:
    """Return whether this thread computes attention again for its gradient."""
    return _thread.now


@contextmanager
def _recomputing() -> Iterator[None]:
    """Mark that attention is computed again, and let nothing compress what that saves for a moment."""
    if is_compiling():
        yield
        return
    before, _thread.now = _thread.now, True
    try:
        with saved_tensors_hooks(_same, _same):
            yield
    finally:
        _thread.now = before


def _same(x: Tensor) -> Tensor:
    return x


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator for `device`."""
    return _generator(device).get_rng_state(*_named(device))


def _generator(device: torch.device) -> Any:
    """Return the module of torch that has the state of the generator of `device`."""
    return torch if device.type in ("cpu", "meta") else torch.get_device_module(device)


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """Return how `_generator` is told which device: not where there is one alone, as of Apple's."""
    return () if device.type in ("cpu", "meta", "mps") else (device,)


@cache
def size_of_state(device: torch.device) -> int:
    """Return the bytes of `random_state`."""
    with _disable_current_modes():
        return random_state(device).numel()


class _replayed:
    """Sets the random state to `state` inside the block and restores it afterwards; None changes nothing."""

    def __init__(self, state: Tensor | None, device: torch.device) -> None:
        self._state, self._device = state, device

    def __enter__(self) -> None:
        if self._state is not None:
            self._before = random_state(self._device)
            self._set(self._state)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._set(self._before)

    def _set(self, state: Tensor) -> None:
        _generator(self._device).set_rng_state(state, *_named(self._device))
