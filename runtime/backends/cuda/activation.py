"""Activations on CUDA: kernels generated from the table, compiled at first use, launched on torch's stream and device.

The forward pass is one kernel that reads x once. A function without a CUDA formula (an expression, a callable) is
torch's own, followed by a kernel that encodes. If `cuda-core` is not installed the reference is used, with one warning.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...tensors.layout import as_dense, with_stride
from ...tensors.packing import packed_size
from ...tensors.table_registry import table_of
from ..forwards import forward_of
from ..reference import activation as reference
from .codegen import FORMULAS, THREADS, Kernel, elements_per_block, kernel_source
from .codegen.compiler import compiler_package, cubin, has_compiler

# Blocks of 8 warps: this many fill a multiprocessor, and each then processes its share of larger tensors.
BLOCKS_PER_MULTIPROCESSOR = 8


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    """Return f(x), with the strides that torch gives it, and the packed codes in that memory order."""
    if not available():
        return reference.activation(x, function, parameters, table)
    if function not in FORMULAS:
        y = forward_of(function).call(x, *parameters)
        return y, encode(with_stride(x, y.stride()), table)
    x = as_dense(x)
    y = _empty_result(x)
    kernel = _kernel("forward", table, x.dtype, x.get_device(), function, tuple(parameters))
    packed = _packed_for(x, kernel.bits)
    kernel.launch(x, x.data_ptr(), y.data_ptr(), packed.data_ptr())
    return y, packed


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    if not available():
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
    if not available():
        return reference.multiply(grad, packed, table)
    kernel = _kernel("multiply", table, grad.dtype, grad.get_device())
    size = packed_size(grad.numel(), kernel.bits)
    if packed.dtype != torch.uint8 or packed.shape != (size,) or packed.device != grad.device:
        raise RuntimeError(
            f"{grad.numel()} codes of {kernel.bits} bits take {size} bytes on {grad.device}, not "
            f"{str(packed.dtype).removeprefix('torch.')} {tuple(packed.shape)} on {packed.device}"
        )
    if packed.data_ptr() % 16 or not packed.is_contiguous():  # a view into a larger tensor
        packed = packed.clone(memory_format=torch.contiguous_format)
    result = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    kernel.launch(grad, grad.data_ptr(), packed.data_ptr(), result.data_ptr())
    return result


@dataclass(frozen=True)
class _Loaded:
    """A kernel loaded on one device."""

    name: str
    bits: int
    device: int
    most_blocks: int
    kernel: Any

    def launch(self, x: Tensor, *pointers: int) -> None:
        """Run over all elements of `x` on torch's current stream of the device."""
        n = x.numel()
        if n == 0:
            return
        blocks = min(-(-n // elements_per_block(x.element_size())), self.most_blocks)
        start(self.kernel, self.name, self.device, blocks, *pointers, n)


def start(kernel: Any, name: str, device: int, blocks: int, *arguments: int) -> None:
    """Launch a compiled kernel of `THREADS` threads a block on torch's current stream of the device.

    Raises:
        RuntimeError: the launch failed.
    """
    config = _config(blocks)
    stream = _stream(torch._C._cuda_getCurrentRawStream(device))
    try:
        if device == torch.cuda.current_device():
            core().launch(stream, config, kernel, *arguments)
        else:
            with torch.cuda.device(device):
                core().launch(stream, config, kernel, *arguments)
    except Exception as error:  # each release of cuda-core has its own class
        raise RuntimeError(f"fewbit's CUDA kernel {name!r} was not launched: {error}") from error


def compiled(source: str, name: str, device: int) -> Any:
    """Return the kernel `name` of a source, compiled for the device and loaded on it."""
    properties = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        made = cubin(source, f"sm_{properties.major}{properties.minor}")
        return core().ObjectCode.from_cubin(made).get_kernel(name)


# One for each table in use. Threads that first need it at the same time each make the same one.
@cache
def _kernel(
    name: Kernel,
    table: str,
    dtype: torch.dtype,
    device: int,
    function: str | None = None,
    parameters: tuple[float, ...] = (),
) -> _Loaded:
    source = kernel_source(table_of(table), str(dtype).removeprefix("torch."), [name], function, parameters)
    most_blocks = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_PER_MULTIPROCESSOR
    return _Loaded(name, table_of(table).bits, device, most_blocks, compiled(source, name, device))


@cache
def core() -> Any:
    """Return the module `cuda.core`, imported when a kernel is first needed."""
    return import_module("cuda.core")


def _empty_result(x: Tensor) -> Tensor:
    """Return uninitialized memory for f(x), with the strides of torch's own functions."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_strided(x.shape, _result_stride(x.shape, x.stride()), dtype=x.dtype, device=x.device)


@lru_cache(1024)
def _result_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    # Not always that of x: torch changes the stride of a dimension of size 1.
    return torch.relu(torch.empty_strided(shape, stride, device="meta")).stride()


def _packed_for(x: Tensor, bits: int) -> Tensor:
    return torch.empty(packed_size(x.numel(), bits), dtype=torch.uint8, device=x.device)


@lru_cache(4096)
def _config(blocks: int) -> Any:
    return core().LaunchConfig(grid=blocks, block=THREADS)


@lru_cache(64)
def _stream(handle: int) -> Any:
    return core().Stream.from_handle(handle)


@cache
def available() -> bool:
    """Return whether kernels can be compiled; if not, warn once."""
    if has_compiler():
        return True
    warnings.warn(
        "fewbit runs on this GPU in plain torch, slowly: cuda-core is not installed; "
        f"pip install '{compiler_package()}'",
        stacklevel=2,
    )
    return False
