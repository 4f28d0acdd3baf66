"""CUDA C++ source of the per-group quantizer's kernels, for one dtype and number of bits."""

from .source import NUMBERS, THREADS, pieces

# Per block and step: groups for `quantize`, where each warp takes one, else elements.
GROUPS_PER_BLOCK = THREADS // 32
CODES_PER_BLOCK = THREADS * 8  # a thread has the 8 codes that are whole bytes
_PIECES = ("numbers", "packing", "kernels", "eights", "philox", "per_group", "extremes", "gather", "per_group_slots")


def per_group_source(dtype: str, bits: int | None, bent: bool = False) -> str:
    """Return the source of two kernels with C names in the namespace `per_group`, `THREADS` threads a block:

        quantize(const T* x, u8* packed, u16* minima, u16* ranges, PLACES, i64 G, SEED, LEVELS)
        dequantize(const u8* packed, const u16* minima, const u16* ranges, T* out, PLACES, i64 G, LEVELS)

    PLACES are (i64 N, i64 D, const u8* sample_bits, const i64* starts, i64 size), the last three null where all samples
    have the same bits. `size` are the bytes of all codes: what would lie outside is not written, and is read as NaN.
    SEED is (i64 seed, const i64* drawn), the address of the seed in the GPU's memory or null. LEVELS are
    (const float* lines, i64 width, i64 shape) as `tensors.levels.Levels` has them. `quantize` takes a G that is a
    multiple of 8 or not below D, `dequantize` any.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: of all samples, or None if each has its own.
        bent: whether levels may be others than equally far apart.
    """
    T, _ = NUMBERS[dtype]
    return "\n".join([pieces(*_PIECES), _KERNELS.format(T=T, bits=bits or 0, bent=str(bent).lower())])


_KERNELS = """\
namespace per_group {{

using fewbit::i64;
using fewbit::u8;
using fewbit::u16;

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
quantize(const {T}* x, u8* packed, u16* minima, u16* ranges, i64 N, i64 D, const u8* sample_bits, const i64* starts,
         i64 size, i64 G, i64 seed, const i64* drawn, const float* lines, i64 width, i64 shape)
{{
    const fewbit::Rows rows = {{N, D, (D + 7) / 8, sample_bits, starts, size}};
    const fewbit::Levels levels = {{lines, width, shape}};
    fewbit::quantize_groups<{T}, {bits}, {bent}>(x, packed, minima, ranges, rows, G, fewbit::key_of(seed, drawn),
                                                 levels);
}}

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
dequantize(const u8* packed, const u16* minima, const u16* ranges, {T}* out, i64 N, i64 D, const u8* sample_bits,
           const i64* starts, i64 size, i64 G, const float* lines, i64 width, i64 shape)
{{
    const fewbit::Rows rows = {{N, D, (D + 7) / 8, sample_bits, starts, size}};
    const fewbit::Levels levels = {{lines, width, shape}};
    fewbit::dequantize_groups<{T}, {bits}, {bent}>(packed, minima, ranges, out, rows, G, levels);
}}

}}  // namespace per_group
"""
