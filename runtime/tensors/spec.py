"""Dense tensors: shape, strides and dtype, which codes do not carry, and the order in which kernels walk them.

A tensor is dense when some order of its dimensions makes it contiguous: row-major, channels-last, transposed. Kernels
walk it in the order of its memory, whatever its strides. Codes are packed in the memory order of the output, which for
a dense input is the input's, so no layout is copied; the backward pass brings the gradient into the layout of the
output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...tables import FewbitError
from . import host_memory


def as_dense(x: Tensor) -> Tensor:
    """Return `x` if it is dense; else a copy with the strides that torch gives f(x)."""
    return x if x.is_contiguous() or _memory_order(x) is not None else x.clone()


def with_known_order(x: Tensor) -> Tensor:
    """Return `x`, while compiling a copy of an expanded one: the compiler preserves the order of strides, of which an
    expanded tensor has none.
    """
    return x.clone() if torch.compiler.is_compiling() and 0 in x.stride() else x


def flat(x: Tensor) -> Tensor:
    """Return the elements of the dense tensor `x` in memory order: a view, (n,)."""
    if x.is_contiguous():
        return x.view(-1)
    order = _memory_order(x)
    if order is None:
        raise FewbitError(f"a dense tensor is expected, not {tuple(x.shape)} with stride {x.stride()}")
    return x.permute(order).view(-1)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of this shape and stride fills a contiguous block of memory, each element once."""
    if _fills(zip(reversed(shape), reversed(stride), strict=True)) or 0 in shape:
        return True
    return _fills(sorted(zip(shape, stride, strict=True), key=lambda dimension: dimension[1]))


def _fills(dimensions: Iterable[tuple[int, int]]) -> bool:
    expected = 1
    for size, step in dimensions:
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def channel_run(shape: Sequence[int], stride: Sequence[int], dim: int) -> int:
    """Return how many elements next to one another in a dense tensor's memory are of the same channel, at least 1.

    Element i in memory is of channel ⌊i/run⌋ mod C. A dimension of one element may have any stride, 0 too: all
    elements are of its one channel.
    """
    return max(1, prod(shape) if shape[dim] == 1 else stride[dim])


def with_stride(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return `x` with the strides `stride`, copied if it has others."""
    if x.stride() == tuple(stride):
        return x
    return x.new_empty_strided(x.shape, stride).copy_(x)


def _memory_order(x: Tensor) -> list[int] | None:
    if torch.compiler.is_compiling():  # by comparisons, which it can trace
        order: list[int] = []
        for dim in range(x.dim()):
            order.insert(len([d for d in order if x.stride(d) >= x.stride(dim)]), dim)
    else:
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return order if x.permute(order).is_contiguous() else None


@dataclass(frozen=True)
class TensorSpec:
    """The spec of one tensor; it makes tensors like it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "TensorSpec":
        """Return the spec of the dense tensor `x`."""
        return cls(x.shape, x.stride(), x.dtype, x.device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor of this spec; `dtype` replaces the spec's own."""
        dtype = dtype or self.dtype
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            return host_memory.reused(self.shape, self.stride, dtype)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=self.device)

    def filled(self, values: Tensor) -> Tensor:
        """Return a tensor of this spec with `values` (n,) in memory order, rounded to its dtype."""
        x = self.empty()
        flat(x).copy_(values)
        return x
