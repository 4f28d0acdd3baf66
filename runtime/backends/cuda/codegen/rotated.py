"""CUDA C++ source of the kernels of rotated codes, for one dtype, number of bits and size of groups."""

from functools import cache

from .source import NUMBERS, THREADS, pieces

HELD = {64: 64, 128: 128, 256: 128}  # elements of a lane, by the size of groups
GROUPS_PER_BLOCK = THREADS // 32  # of fewer than 64 elements
_PIECES = ("numbers", "packing", "kernels", "eights", "philox")
_OF_ROTATED = ("rotated_exchange", "rotated_codes", "rotated", "rotated_short")


@cache
def rotated_source(dtype: str, bits: int, size: int | None) -> str:
    """Return the source of two kernels with C names in the namespace `rotated`, `THREADS` threads a block:

        quantize(const T* x, u8* packed, u16* scales, PIECE, i64 turns, i64 unbiased, const float* levels,
                 const float* edges, SEED)
        dequantize(const u8* packed, const u16* scales, T* out, PIECE, i64 turns, const float* levels, SEED)

    PIECE is (i64 rows, i64 D, i64 start, i64 size, i64 count, i64 first, i64 of_row, i64 counters): `Piece` of a row
    of D elements with `of_row` groups, each of which draws so many counters.
    SEED is (i64 seed, const i64* drawn): the seed, and null; or the address of a key in the GPU's memory, and how far
    the seed is behind it.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: of a code.
        size: of a group: 64, 128 or 256; None for the one of fewer that a row ends with.
    """
    T, _ = NUMBERS[dtype]
    names, arguments, given, residents = "short", f"{T}, {bits}", "int(size), ", f"fewbit::residents<{T}>"
    if size is not None:  # 255 registers of a thread: a block of 256 at a time
        names, arguments, given, residents = "rotated", f"{T}, {bits}, {size}", "", "1"
    kernels = _KERNELS.format(T=T, names=names, arguments=arguments, given=given, residents=residents)
    return "\n".join([pieces(*_PIECES, *_OF_ROTATED), kernels])


_KERNELS = """\
namespace rotated {{

using fewbit::i64;
using fewbit::u8;
using fewbit::u16;

extern "C" __global__ void __launch_bounds__(fewbit::threads, {residents})
quantize(const {T}* x, u8* packed, u16* scales, i64 rows, i64 D, i64 start, i64 size, i64 count, i64 first, i64 of_row,
         i64 counters, i64 turns, i64 unbiased, const float* levels, const float* edges, i64 seed,
         const i64* drawn)
{{
    const fewbit::Pieces pieces = {{rows, D, start, count, first, of_row, counters}};
    fewbit::quantize_{names}<{arguments}>(
        x, packed, scales, pieces, {given}int(turns), unbiased != 0, levels, edges, fewbit::key_of(seed, drawn));
}}

extern "C" __global__ void __launch_bounds__(fewbit::threads, {residents})
dequantize(const u8* packed, const u16* scales, {T}* out, i64 rows, i64 D, i64 start, i64 size, i64 count, i64 first,
           i64 of_row, i64 counters, i64 turns, const float* levels, i64 seed, const i64* drawn)
{{
    const fewbit::Pieces pieces = {{rows, D, start, count, first, of_row, counters}};
    fewbit::dequantize_{names}<{arguments}>(
        packed, scales, out, pieces, {given}int(turns), levels, fewbit::key_of(seed, drawn));
}}

}}  // namespace rotated
"""
