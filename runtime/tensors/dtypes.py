"""The dtypes that fewbit supports, and their ranges."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The formats that the CPU kernels read and write; float64 is converted to float32 first.
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def name_of(dtype: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype, or of a layout, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def as_kind(x: Tensor, *, keep_positive: bool) -> Tensor:
    """Return `x` in a format that kernels read: float64 rounded to float32, if `keep_positive` not to 0 from above."""
    if x.dtype in KINDS:
        return x
    single = x.float()
    return torch.where((x > 0) & (single == 0), smallest(torch.float32), single) if keep_positive else single


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of `dtype`, or of float32 if that is smaller."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def smallest(dtype: torch.dtype) -> float:
    """Return a number just above 0 that `dtype` represents and that survives flushing of subnormal float32 numbers."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's (MPS) do not, nor do some of Intel's (XPU)."""
    if device.type in ("cpu", "cuda", "meta", "mps"):
        return device.type != "mps"
    with unset_fake_temporarily():
        try:
            torch.ones((), dtype=torch.float64, device=device).add_(1)
        except (TypeError, RuntimeError):
            return False
    return True


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no float64."""
    return torch.float64 if has_float64(device) else torch.float32


def sum_of_squares(x: Tensor) -> float:
    """Return the sum of the squares, in float64 where the device has it."""
    return float(x.to(widest_dtype(x.device)).square().sum())


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are multiplied."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
