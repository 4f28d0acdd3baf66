"""CUDA C++ from a table: kernels that encode, and that multiply a gradient by the table's levels. Needs no torch."""

from .formulas import FORMULAS, function_of
from .source import NUMBERS, THREADS, Kernel, cuda_header, elements_per_block, kernel_source

__all__ = [
    "FORMULAS",
    "NUMBERS",
    "THREADS",
    "Kernel",
    "cuda_header",
    "elements_per_block",
    "function_of",
    "kernel_source",
]
