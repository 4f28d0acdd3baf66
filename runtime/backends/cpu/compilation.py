"""Compile a kernel: once, whichever processes need it at the same time, with a line that says which one it is."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.caching import FunctionCache

from ....tables.compiling import compiled_once
from .threads import Kernel

# Kernels in the files of this folder; a test counts them. A training seldom needs more than a few.
KERNELS = 23
_SIGNATURE = types.void(types.CPointer(types.int64))
# What this process has begun to compile: a kernel's name and its number in the lines.
_numbers: dict[str, int] = {}


def compile_kernel(body: Callable[[Any], None]) -> Kernel:
    """Compile void(int64 *job), or load it from Numba's disk cache.

    Its variants, which have one name and one index in that cache, have one lock: Numba numbers their files without
    any, and of two processes that save at the same time one may be given the other's code.
    """

    def make() -> Any:
        return cfunc(_SIGNATURE, cache=True, error_model="numpy")(body)

    file = body.__module__.rpartition(".")[2]
    lock = Path(FunctionCache(body).cache_path) / f"{file}.{body.__qualname__.replace('.<locals>', '')}.lock"
    name = f"{file.removesuffix('_kernels')} {body.__name__}"
    compiled = compiled_once(make, lock, name, lambda: f"{_numbers.setdefault(name, len(_numbers) + 1)} of {KERNELS}")
    return Kernel(compiled.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), compiled)
