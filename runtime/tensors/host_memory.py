"""Memory for large results on the CPU.

A fresh 64 MiB tensor is mapped by the kernel a page at a time as it is first written, and 16,384 faults of 4 KiB take
three times longer than computing a GELU into it. On Linux a mapping may ask for 2 MiB pages instead (madvise); most
distributions grant that on request and only then. Torch does the same under THP_MEM_ALLOC_ENABLE=1.

Even then the kernel clears every page first, which takes as long as decompressing into it. What is decompressed is
needed for a moment, and the next tensor soon after: so the memory of the last one that is gone is kept for the next. It
is marked as free (MADV_FREE): until it is taken again the system may have its pages whenever it is short of memory.
"""

import ctypes
import sys
import weakref

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_FREE = 14, 8
# Smaller blocks come from the allocator's own heap, already mapped.
_LEAST_BYTES = 16 * _HUGE_PAGE


def is_large(x: Tensor) -> bool:
    """Tell whether huge pages would serve a tensor of the size of `x`."""
    return x.numel() * x.element_size() >= _LEAST_BYTES and _madvise is not None


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialised tensor like `x`, on huge pages if it is large and the system grants them."""
    result = torch.empty_like(x)
    if is_large(x) and _madvise is not None:
        size = result.numel() * result.element_size()
        start = -(-result.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (result.data_ptr() + size) // _HUGE_PAGE * _HUGE_PAGE
        _madvise(start, end - start, _MADV_HUGEPAGE)  # a hint: refused, the small pages serve
    return result


def reused(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised dense tensor on the CPU for a passing result; it may not be resized if it is large.

    It may then lie in the memory of an earlier one that nobody holds any more.
    """
    empty = torch.empty(0, dtype=dtype, device="cpu")
    size = shape.numel() * dtype.itemsize
    if size < _LEAST_BYTES or _madvise is None or type(empty) is not Tensor:  # nor is a fake one
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    block = _taken(size)
    start = min(-block.ctypes.data % _HUGE_PAGE, block.size - size)
    memory = block[start : start + size]
    # Torch holds `memory` itself as long as the storage lives: views and other tensors of it too.
    weakref.finalize(memory, _keep, block).atexit = False
    return empty.set_(torch.from_numpy(memory).untyped_storage(), 0, shape, stride)


def _taken(size: int) -> np.ndarray:
    """Return the block that is kept, if it has at least `size` bytes and is no waste for them, or else a new one."""
    try:
        block = _kept.pop()
    except IndexError:
        block = None
    if block is None or not size <= block.size <= 2 * size:
        block = np.empty(size + _HUGE_PAGE, np.uint8)
        _advise(block, _MADV_HUGEPAGE)
    return block


# At most one block. Its operations are atomic: storages die on any thread.
_kept: list[np.ndarray] = []


def _keep(block: np.ndarray) -> None:
    _advise(block, _MADV_FREE)
    _kept[:] = [block]


def _advise(block: np.ndarray, advice: int) -> None:
    """Tell the system about the whole huge pages of a block: a hint."""
    start = -(-block.ctypes.data // _HUGE_PAGE) * _HUGE_PAGE
    end = (block.ctypes.data + block.size) // _HUGE_PAGE * _HUGE_PAGE
    if _madvise is not None:
        _madvise(start, end - start, advice)


def _find_madvise() -> "ctypes._NamedFuncPointer | None":
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()
