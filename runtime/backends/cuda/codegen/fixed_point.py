"""CUDA C++ source of the kernels of the fixed-point quantizer and of pre-activation layers."""

from .source import NUMBERS, THREADS, pieces

ELEMENTS_PER_BLOCK = THREADS * 8  # a thread has the 8 elements whose codes are whole bytes
WARPS_PER_BLOCK = THREADS // 32
ROWS = 7  # of the table: o, Δ, 1/Δ, z, offset and slope of Ã₁, z adjusted where γ = 0
_PIECES = ("numbers", "packing", "kernels", "eights", "extremes", "gather", "channels", "fixed_point")


def fixed_point_source(dtype: str, bits: int) -> str:
    """Return the source of kernels with C names in the namespace `fixed_point`, `THREADS` threads a block.

    SHAPE is (i64 n, i64 inner, i64 C): element i in memory belongs to channel (i / inner) mod C. `leak` is the slope of
    the leaky ReLU, the bits of a float. Outputs are documented at each kernel in fixed_point.cuh.

        tabulate(const void* scale, i64 scale_kind, const void* shift, i64 shift_kind, float* table, i64 C, i64 all)
        quantize(const T* x, u8* packed, const float* origin, const float* inverse, const int* zero, SHAPE)
        dequantize(const u8* packed, T* out, const float* origin, const float* step, const int* zero, SHAPE)
        encode(T* A, const T* x, u8* packed, const float* table, const float* mean, const float* r, SHAPE, i64 leak)
        decode(const u8* packed, T* out, const float* table, SHAPE, i64 leak)
        sums(const u8* packed, const T* gradient, const float* table, float* sums, i64 shares, SHAPE, i64 leak)
        finish(const float* sums, float* results, const double* scale, const float* r, i64 shares, i64 elements,
               i64 by_batch, i64 C)
        normalize(const u8* packed, T* gradient, const float* table, const float* results, SHAPE, i64 leak)

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: K, 1 to 8.
    """
    T, _ = NUMBERS[dtype]
    kernels = (
        f'extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)\n{text}'
        for text in _KERNELS.format(T=T, bits=bits).split("\n\n")
    )
    return "\n".join([pieces(*_PIECES), _HEAD, *kernels, "}  // namespace fixed_point\n"])


_HEAD = """\
namespace fixed_point {

using fewbit::i64;
using fewbit::u8;

__device__ inline float number(i64 bits) { return __uint_as_float(fewbit::u32(bits)); }
"""

_KERNELS = """\
tabulate(const void* scale, i64 scale_kind, const void* shift, i64 shift_kind, float* table, i64 C, i64 all)
{{
    fewbit::tabulate_channels<{bits}>(scale, scale_kind, shift, shift_kind, table, C, all != 0);
}}

quantize(const {T}* x, u8* packed, const float* origin, const float* inverse, const int* zero, i64 n, i64 inner, i64 C)
{{
    fewbit::quantize_channels<{T}, {bits}>(x, packed, origin, inverse, zero, n, inner, C);
}}

dequantize(const u8* packed, {T}* out, const float* origin, const float* step, const int* zero, i64 n, i64 inner, i64 C)
{{
    fewbit::dequantize_channels<{T}, {bits}, false>(packed, out, origin, step, zero, n, inner, C, 1);
}}

encode({T}* A, const {T}* x, u8* packed, const float* table, const float* mean, const float* r, i64 n, i64 inner, i64 C,
       i64 leak)
{{
    fewbit::encode_channels<{T}, {bits}>(A, x, packed, table, mean, r, n, inner, C, number(leak));
}}

decode(const u8* packed, {T}* out, const float* table, i64 n, i64 inner, i64 C, i64 leak)
{{
    const fewbit::PreActQuantParams m(table, C);
    fewbit::dequantize_channels<{T}, {bits}, true>(packed, out, m.origin, m.step, m.sign, n, inner, C, number(leak));
}}

sums(const u8* packed, const {T}* gradient, const float* table, float* sums, i64 shares, i64 n, i64 inner, i64 C,
     i64 leak)
{{
    fewbit::sum_channels<{T}, {bits}>(packed, gradient, table, sums, shares, n, inner, C, number(leak));
}}

finish(const float* sums, float* results, const double* scale, const float* r, i64 shares, i64 elements, i64 by_batch,
       i64 C)
{{
    fewbit::finish_channels(sums, results, scale, r, shares, elements, by_batch, C);
}}

normalize(const u8* packed, {T}* gradient, const float* table, const float* results, i64 n, i64 inner, i64 C, i64 leak)
{{
    fewbit::normalize_channels<{T}, {bits}>(packed, gradient, table, results, n, inner, C, number(leak));
}}
"""
