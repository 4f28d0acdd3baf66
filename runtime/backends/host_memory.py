"""Memory for large results on the CPU.

A fresh 64 MiB tensor is mapped by the kernel a page at a time as it is first written, and 16,384 faults of 4 KiB take
three times longer than computing a GELU into it. On Linux a mapping may ask for 2 MiB pages instead (madvise); most
distributions grant that on request and only then. Torch does the same under THP_MEM_ALLOC_ENABLE=1.
"""

import ctypes
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14
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
