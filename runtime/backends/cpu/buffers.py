"""Memory for what kernels write when compiled code calls them, allocated as that code does (direct_calls.py)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PLANS = 4096  # of calls on buffers, that are kept
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor on the CPU of this shape, these strides and this dtype."""


def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    stride = [1]
    for size in shape[:0:-1]:
        stride.insert(0, stride[0] * max(size, 1))
    return tuple(stride)
