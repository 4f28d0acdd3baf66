"""Activations on CUDA: kernels generated from the table, compiled at first use, launched on torch's stream and device.

The forward pass is one kernel that reads x once. A function without a CUDA formula (an expression, a callable) is
torch's own, followed by a kernel that encodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ...tensors.levels import table_of
from ...tensors.packing import packed_size
from ...tensors.spec import as_dense, with_stride
from ...tensors.traits import name_of
from ..forwards import forward_of, key_of
from ..reference import activation as reference
from .codegen import FORMULAS, Kernel, elements_per_block, kernel_source
from .launching import Loaded, aligned, available, loaded


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    """Return f(x), with the strides that torch gives it, and the packed codes in that memory order."""
    if not available(x.get_device()):
        return reference.activation(x, function, parameters, table)
    if function not in FORMULAS:
        y = forward_of(function).call(x, *parameters)
        return y, encode(with_stride(x, y.stride()), table)
    x = as_dense(x)
    y = empty_result(x)
    kernel = _kernel("forward", table, x.dtype, x.get_device(), function, key_of(parameters))
    packed = _packed_for(x, kernel.bits)
    kernel.launch(x, x.data_ptr(), y.data_ptr(), packed.data_ptr())
    return y, packed


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    if not available(x.get_device()):
        return reference.encode(x, table)
    kernel = _kernel("encode", table, x.dtype, x.get_device())
    packed = _packed_for(x, kernel.bits)
    kernel.launch(x, x.data_ptr(), packed.data_ptr())
    return packed


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout.

    Raises:
        RuntimeError: `packed` does not hold the codes of as many elements on the same device.
    """
    if not available(grad.get_device()):
        return reference.multiply(grad, packed, table)
    kernel = _kernel("multiply", table, grad.dtype, grad.get_device())
    size = packed_size(grad.numel(), kernel.bits)
    if packed.dtype != torch.uint8 or packed.shape != (size,) or packed.device != grad.device:
        raise RuntimeError(
            f"{grad.numel()} codes of {kernel.bits} bits take {size} bytes on {grad.device}, not "
            f"{name_of(packed.dtype)} {tuple(packed.shape)} on {packed.device}"
        )
    packed = aligned(packed)
    result = torch.empty_like(grad)
    kernel.launch(grad, grad.data_ptr(), packed.data_ptr(), result.data_ptr())
    return result


@dataclass(frozen=True)
class _OfTable:
    """A kernel of a table, on one device."""

    bits: int
    kernel: Loaded

    def launch(self, x: Tensor, *pointers: int) -> None:
        """Run over all elements of `x`."""
        n = x.numel()
        self.kernel.launch(-(-n // elements_per_block(x.element_size())), *pointers, n)


# One for each table in use. Threads that first need it at the same time each make the same one.
@cache
def _kernel(
    name: Kernel,
    table: str,
    dtype: torch.dtype,
    device: int,
    function: str | None = None,
    parameters: tuple[str, ...] = (),
) -> _OfTable:
    source = kernel_source(table_of(table), name_of(dtype), [name], function, tuple(map(float, parameters)))
    return _OfTable(table_of(table).bits, loaded(source, name, device))


def empty_result(x: Tensor) -> Tensor:
    """Return uninitialized memory for f(x), with the strides of torch's own functions."""
    if x.is_contiguous():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_strided(x.shape, _result_stride(x.shape, x.stride()), dtype=x.dtype, device=x.device)


@lru_cache(1024)
def _result_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    # Not always that of x: torch changes the stride of a dimension of size 1.
    return torch.relu(torch.empty_strided(shape, stride, device="meta")).stride()


def _packed_for(x: Tensor, bits: int) -> Tensor:
    return torch.empty(packed_size(x.numel(), bits), dtype=torch.uint8, device=x.device)
