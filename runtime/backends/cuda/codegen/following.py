"""CUDA C++ source of the kernels whose table lies in memory, for one dtype and number of bits."""

from functools import cache

from .source import NUMBERS, THREADS, pieces

ELEMENTS_PER_BLOCK = THREADS * 8  # a thread has the 8 elements whose codes are whole bytes
_PIECES = ("numbers", "packing", "kernels", "eights", "following")


@cache
def following_source(dtype: str, bits: int) -> str:
    """Return the source of two kernels with C names in the namespace `following`, `THREADS` threads a block:

        encode(const T* x, u8* packed, i64 n, const T* boundaries, i64 count, const u8* codes)
        multiply(const T* grad, const u8* packed, T* result, i64 n, const float* levels, i64 count)

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: of a code.
    """
    T, _ = NUMBERS[dtype]
    return "\n".join([pieces(*_PIECES), _KERNELS.format(T=T, bits=bits)])


_KERNELS = """\
namespace following {{

using fewbit::i64;
using fewbit::u8;

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
encode(const {T}* x, u8* packed, i64 n, const {T}* boundaries, i64 count, const u8* codes)
{{
    fewbit::encode_eights<{T}, {bits}>(x, packed, n, boundaries, int(count), codes);
}}

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
multiply(const {T}* grad, const u8* packed, {T}* result, i64 n, const float* levels, i64 count)
{{
    fewbit::multiply_eights<{T}, {bits}>(grad, packed, result, n, levels, fewbit::u32(count));
}}

}}  // namespace following
"""
