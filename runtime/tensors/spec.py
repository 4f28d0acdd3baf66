"""Shape, layout and dtype of a dense tensor, which its codes do not carry."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import host_memory
from .layout import flat


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
