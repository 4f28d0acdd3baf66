"""Memory for large results on the CPU.

The kernel maps a fresh 64 MiB tensor page by page as it is first written, and 16,384 faults of 4 KiB take three times
longer than computing a GELU into it. On Linux a mapping may request 2 MiB pages instead (madvise); most distributions
grant them only on request. Torch does the same under THP_MEM_ALLOC_ENABLE=1.

Even then the kernel clears every page first, which takes as long as decompressing into it. A decompressed tensor is
needed only briefly, and the next one soon after: so the last block freed is reused for the next tensor. Until then it
is marked as free (MADV_FREE), and the system may reclaim its pages whenever memory is short.
"""

import ctypes
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21  # bytes, where a page has 4 KiB
_MADV_HUGEPAGE, _MADV_FREE = 14, 8  # of Linux: asm-generic/mman-common.h
# Smaller blocks come from the allocator's own heap, already mapped.
_LEAST_BYTES = 16 * _HUGE_PAGE


def is_large(x: Tensor) -> bool:
    """Return whether a tensor of the size of `x` benefits from huge pages."""
    return x.numel() * x.element_size() >= _LEAST_BYTES and _madvise is not None


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialized tensor like `x`, on huge pages if it is large and the system grants them."""
    return _on_huge_pages(torch.empty_like(x))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized row-major tensor on the CPU, likewise."""
    return _on_huge_pages(torch.empty(shape, dtype=dtype, device="cpu"))


def _on_huge_pages(new: Tensor) -> Tensor:
    if is_large(new):
        _advise(new.data_ptr(), new.numel() * new.element_size(), _MADV_HUGEPAGE)
    return new


def reused(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized dense tensor on the CPU for a temporary result; do not resize it if it is large.

    It may reuse the memory of an earlier such tensor that has been freed.
    """
    size = shape.numel() * dtype.itemsize
    if size < _LEAST_BYTES or _madvise is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    nothing = torch.empty(0, dtype=dtype, device="cpu")
    if type(nothing) is not Tensor:  # a fake tensor has no memory
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    try:
        block = _kept.pop()
    except IndexError:
        block = None
    if block is None or not size <= block.size <= 2 * size:  # too small, or mostly wasted
        block = np.empty(size + _HUGE_PAGE, np.uint8)
        _advise(block.ctypes.data, block.size, _MADV_HUGEPAGE)
    start = min(-block.ctypes.data % _HUGE_PAGE, block.size - size)
    memory = block[start : start + size]
    # Torch holds `memory` as long as the storage lives, and so do views and other tensors of the storage.
    weakref.finalize(memory, _keep, block).atexit = False
    return nothing.set_(torch.from_numpy(memory).untyped_storage(), 0, shape, stride)


# At most one block. List operations are atomic: storages are freed on any thread.
_kept: list[np.ndarray] = []


def _keep(block: np.ndarray) -> None:
    _advise(block.ctypes.data, block.size, _MADV_FREE)
    _kept[:] = [block]


def _advise(address: int, size: int, advice: int) -> None:
    """Advise the system about the whole huge pages of a block: a hint, and if it is refused pages stay small."""
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    end = (address + size) // _HUGE_PAGE * _HUGE_PAGE
    if _madvise is not None:
        _madvise(start, end - start, advice)


_madvise: "ctypes._NamedFuncPointer | None" = None
if sys.platform == "linux":
    with suppress(OSError, AttributeError):
        _madvise = ctypes.CDLL(None).madvise
        _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
