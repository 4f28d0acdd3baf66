"""The C library's allocator, which keeps freed blocks for later.

    return_freed_memory()      from now on it returns them to the system at once

Few-bit training frees large tensors and keeps small codes that were made between them. In glibc's heap, which by and by
serves blocks of up to 32 MiB, each code then holds the gap before it: a process may hold several times what torch has.
"""

import ctypes
import sys

# Of malloc.h in glibc: parameters of `mallopt`, and the size from which a block has memory of its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN_MAPPING = 1 << 16


def return_freed_memory() -> None:
    """Make glibc's malloc return freed blocks to the system at once; elsewhere do nothing.

    A block of 64 KiB or more then has memory of its own, which costs page faults whenever it is used anew. Call it
    before training on a CPU whose memory is scarce. On a GPU it changes nothing: torch's own allocator serves it.

    Example:
        fewbit.memory.return_freed_memory()
        model = fewbit.convert(model, level="L2")
    """
    # Only Linux has glibc, and Windows no library of the process itself.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_MAPPING)
        mallopt(_TRIM_THRESHOLD, _OWN_MAPPING)
