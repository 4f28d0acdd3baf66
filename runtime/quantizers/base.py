"""What the quantizers share: their arguments, the layout of a tensor, the numbers of a dtype, the choice of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors import host_memory
from ..tensors.layout import flat
from ..tensors.table_registry import DTYPES

BLOCK = 512  # elements a kernel works on at once
# The formats that the CPU kernels read and write; float64 is theirs after a conversion to float32.
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Compressed(Protocol):
    """A tensor in few bits."""

    def decompress(self) -> Tensor:
        """Return a tensor of the shape, dtype, device and layout of the one that was compressed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        ...


class Quantizer(Protocol):
    """What compresses a tensor by itself, as `PerGroup` and `Outlier` do."""

    def compress(self, x: Tensor, /) -> Compressed:
        """Return `x` in few bits."""
        ...


@dataclass(frozen=True)
class Form:
    """Shape, layout and dtype of a dense tensor: what its codes do not tell."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        """Return the form of the dense tensor `x`."""
        return cls(x.shape, x.stride(), x.dtype, x.device)

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of this form, or of another dtype."""
        dtype = dtype or self.dtype
        if self.device.type == "cpu":
            return host_memory.reused(self.shape, self.stride, dtype)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=self.device)

    def filled(self, values: Tensor) -> Tensor:
        """Return a tensor of this form with `values` (n,) in memory order, rounded to its dtype."""
        x = self.empty()
        flat(x).copy_(values)
        return x


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise FewbitError unless `value` is an integer from `least` to `most`."""
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not inside or (most is not None and value > most):  # pyright: ignore[reportOperatorIssue]
        accepted = f"from {least} to {most}" if most is not None else f"not below {least}"
        raise FewbitError(f"{name} is an integer {accepted}, not {shown(value)}")


def check_tensor(quantizer: str, x: object) -> None:
    """Raise FewbitError unless `x` is a dense or strided tensor of a floating-point dtype that quantizers take."""
    if not isinstance(x, Tensor):
        raise FewbitError(f"{quantizer} compresses a tensor, not {shown(x)}")
    if x.dtype not in DTYPES or x.layout != torch.strided:
        accepted = ", ".join(name_of(d) for d in DTYPES)
        given = name_of(x.dtype) if x.layout == torch.strided else str(x.layout).removeprefix("torch.")
        raise FewbitError(f"{quantizer} compresses strided tensors of {accepted}, not {given}")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def has_kernels(x: Tensor) -> bool:
    """Tell whether the CPU kernels serve `x`: memory of this process, and no stand-in for it."""
    return x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def is_batch(x: Tensor) -> bool:
    """Tell whether `x` stands for many tensors, as gradients do under ``is_grads_batched``: no memory of its own."""
    return is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)


def as_kind(x: Tensor, *, keep_positive: bool) -> Tensor:
    """Return `x` in a format that kernels read: float64 is rounded to float32, if so asked nothing positive to 0."""
    if x.dtype in KINDS:
        return x
    single = x.float()
    return torch.where((x > 0) & (single == 0), smallest(torch.float32), single) if keep_positive else single


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of `dtype`, or of float32 if that is smaller."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def smallest(dtype: torch.dtype) -> float:
    """Return a number just above 0 that `dtype` holds and that no flushing of subnormal float32 numbers loses."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors)
