"""Activations on the CPU: torch's own forward, Numba kernels for the codes, on torch's threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from ...tensors import host_memory
from ...tensors.levels import prepare
from ...tensors.packing import packed_size
from ...tensors.spec import with_stride
from ..forwards import forward_of, key_of
from ..torch_functions import Forward
from .activation_kernels import BLOCK, FORMATS, LINEAR_LIMIT, encode_kernel, look_up_kernel, multiply_kernel
from .threads import Kernel, one_thread, run

# From here on a table of all 16-bit numbers pays off: torch computes it in the time of some 100,000 elements.
_LEAST_LOOKED_UP = 1 << 18
_LESS_THAN_A_VECTOR = 63  # torch's step is two AVX-512 registers, 64 elements
_SUBNORMAL = 5e-324  # which this thread takes for 0 under torch.set_flush_denormal(True)


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    """Return f(x), by torch's own function with torch's strides, and its packed codes in that memory order."""
    # What is looked up lasts: under `set_flush_denormal` torch computes another f(x) for subnormal bfloat16.
    lasts = _SUBNORMAL != 0.0
    if x.dtype.itemsize == 2 and x.numel() >= _LEAST_LOOKED_UP and x.is_contiguous() and lasts:
        entries = _entries(function, key_of(parameters), table, x.dtype, torch._C._get_mkldnn_enabled())
        if entries is not None:
            bits = prepare(table, x.dtype, x.device).bits
            n = x.numel()
            y = host_memory.empty_like(x)
            packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
            arguments = (x.data_ptr(), n, entries.ctypes.data, y.data_ptr(), bits, packed.data_ptr())
            run(look_up_kernel(), _blocks(n), *arguments)
            return y, packed
    y = _forward(x, forward_of(function), parameters)  # with the strides of x: torch rounds differently for others
    return y, encode(with_stride(x, y.stride()), table)


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    encoder = _encoder(table, x.dtype)
    n = x.numel()
    packed = torch.empty(packed_size(n, encoder.bits), dtype=torch.uint8, device="cpu")
    run(encoder.kernel, _blocks(n), x.data_ptr(), n, *encoder.arguments, encoder.bits, packed.data_ptr())
    return packed


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout."""
    kernel, levels, bits = _multiplier(table, grad.dtype)
    n = grad.numel()
    if packed.dtype != torch.uint8 or packed.shape != (packed_size(n, bits),) or not packed.is_contiguous():
        raise RuntimeError(f"{n} codes of {bits} bits take {packed_size(n, bits)} bytes, not {_shown(packed)}")
    result = host_memory.empty_like(grad)
    run(kernel, _blocks(n), grad.data_ptr(), n, packed.data_ptr(), bits, levels.ctypes.data, result.data_ptr())
    return result


def _forward(x: Tensor, function: Forward, parameters: Sequence[float]) -> Tensor:
    if function.out is None or not host_memory.is_large(x):
        return function.call(x, *parameters)
    return function.out(x, *parameters, out=host_memory.empty_like(x))


def _blocks(n: int) -> int:
    return (n + BLOCK - 1) // BLOCK


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} with stride {tensor.stride()}"


# ---- 16-bit numbers: f(x) and the code of each of them ---------------------------------------------------------------


@lru_cache(maxsize=64)
def _entries(
    function: str, parameters: tuple[str, ...], table: str, dtype: torch.dtype, mkldnn: bool
) -> np.ndarray | None:
    """Return uint32 (65536,): for every 16-bit x the bits of f(x), above them the code; None if `_values` is None."""
    y = _values(function, parameters, dtype, mkldnn)
    if y is None:
        return None
    every = _every_number(dtype)
    prepared = prepare(table, dtype, torch.device("cpu"))
    with torch.device("cpu"):
        codes = prepared.codes[torch.searchsorted(prepared.boundaries, every)]
    return codes.numpy().astype(np.uint32) << 16 | y.view(torch.int16).numpy().view(np.uint16)


@lru_cache(maxsize=64)
def _values(function: str, parameters: tuple[str, ...], dtype: torch.dtype, mkldnn: bool) -> Tensor | None:
    """Return f(x) for every 16-bit x, or None if f(x) does not depend on x alone.

    Torch computes most elements by vector instructions, the last ones of a tensor and those of some layouts one by one,
    and a few functions in oneDNN (if it is enabled: `mkldnn`); these round differently. Which NaN a NaN gives is
    unspecified.
    """
    forward = forward_of(function)
    if not forward.pure:
        return None
    with torch.no_grad(), torch.device("cpu"):
        every = _every_number(dtype)
        numbers = tuple(map(float, parameters))
        y = forward.call(every, *numbers)
        one_by_one = forward.call(every.repeat_interleave(2)[::2], *numbers)
        if _same(y, one_by_one):
            return y
        # For example oneDNN's GELU, for contiguous tensors alone; it too has other instructions for the last elements.
        with one_thread():
            ends = [forward.call(part, *numbers) for part in every.split(_LESS_THAN_A_VECTOR)]
    parts = y.split(_LESS_THAN_A_VECTOR)  # beside each other: autocast joins no 16-bit numbers but its own
    return y if all(map(_same, parts, ends)) else None


def _every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())


# ---- tables in the kernels' format -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoder:
    """The kernel for a table and a dtype.

    Attributes:
        arguments: kernel arguments from `boundaries` to `codes`: addresses in `arrays`.
    """

    kernel: Kernel
    arguments: tuple[int, int, int, int]
    bits: int
    arrays: tuple[np.ndarray, ...]


@cache
def _encoder(table: str, dtype: torch.dtype) -> _Encoder:
    name = str(dtype).removeprefix("torch.")
    floats = FORMATS[name]
    prepared = prepare(table, dtype, torch.device("cpu"))
    integer_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    boundaries = floats.keys(prepared.boundaries.view(integer_dtype).numpy())
    codes = prepared.codes.numpy()
    m = boundaries.size
    linear = m <= LINEAR_LIMIT
    padding = -m % 4 if linear else (1 << m.bit_length()) - 1 - m
    boundaries = np.pad(boundaries, (0, padding), constant_values=np.iinfo(floats.integer).max)
    codes = np.pad(codes, (0, padding), mode="edge")
    steps = np.diff(codes.astype(floats.integer))
    arguments = (boundaries.ctypes.data, boundaries.size, steps.ctypes.data if linear else 0, codes.ctypes.data)
    return _Encoder(encode_kernel(name), arguments, prepared.bits, (boundaries, steps, codes))


@cache
def _multiplier(table: str, dtype: torch.dtype) -> tuple[Kernel, np.ndarray, int]:
    prepared = prepare(table, dtype, torch.device("cpu"))
    levels = prepared.levels.numpy()
    padded = np.pad(levels, (0, (1 << prepared.bits) - levels.size))
    kernel = multiply_kernel(str(dtype).removeprefix("torch."), bool((padded == 0).any()))
    return kernel, padded, prepared.bits
