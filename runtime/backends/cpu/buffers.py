"""Calls of kernels by compiled code (direct_calls.py), which allocates what they write as the code around it does.

Between the large operations of a training step every line of Python waits for memory, and takes ten times as long as in
a loop of its own: little else than the kernel may be left to a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .threads import Kernel

PLANS = 4096  # of calls on buffers, that are kept
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor on the CPU of this shape, these strides and this dtype."""


def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class BufferPlan:
    """What does not change from call to call of a kernel on buffers.

    Attributes:
        kernel: the kernel.
        job: the job's words, with 0 for addresses and the seed.
        shape, stride: of the result.
        codes: bytes before them in the buffer.
    """

    kernel: Kernel
    job: bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    codes: int

    @classmethod
    def of(cls, kernel: Kernel, job: Any, shape: Sequence[int], codes: int) -> "BufferPlan":
        """Return the plan of a contiguous result."""
        stride = [1]
        for size in shape[:0:-1]:
            stride.insert(0, stride[0] * max(size, 1))
        return cls(kernel, bytes(job), tuple(shape), tuple(stride), codes)
