"""CUDA C++ source of the outlier quantizer's kernels: selection for a dtype, codes for a dtype and number of bits."""

from .source import NUMBERS, THREADS, pieces

CHUNK = 960  # elements that a warp takes at once: four blocks of positions
WARPS_PER_BLOCK = THREADS // 32
CHUNKS_PER_BLOCK = THREADS  # of the scans: a part
SELECTION_BYTES = 32840  # of the struct Selection, which begins with the number of outliers, int64
_SCANS = ("add", "scan", "locate")  # these take the registers that they need
_OUTLIER = ("outlier", "outlier_search", "outlier_scan", "outlier_codes")
_PIECES = ("numbers", "packing", "kernels", "eights", "extremes", "gather", *_OUTLIER)


def selection_source(dtype: str) -> str:
    """Return the source of kernels with C names in the namespace `outlier`, `THREADS` threads a block.

    They run one after the other: `first`, `survey`, `refine` (float32 alone), `count`, `add`, `scan`; without a rank
    `survey`, `add` and `scan` alone. `totals` are of each `CHUNKS_PER_BLOCK` chunks. CHUNKS are
    (u32* counts, void* equals, u64* list, u64* listed, i64 room): see outlier.cuh.

        first(const T* x, void* selection, i64 n, i64 relu)
        survey(const T* x, void* selection, const void* sample, CHUNKS, i64 n, i64 rank, i64 relu)
        refine(const T* x, void* selection, CHUNKS, i64 n, i64 relu)
        count(const T* x, void* selection, CHUNKS, i64 n, i64 relu)
        add(CHUNKS, u64* totals, i64 n)
        scan(const T* x, void* selection, CHUNKS, const u64* totals, i64* starts, i64 n, i64 relu)

    All but `add` and `scan` take the same number of blocks; those take one for `CHUNKS_PER_BLOCK` chunks.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
    """
    kernels = _SELECTION if has_third_digit(dtype) else [text for text in _SELECTION if not text.startswith("refine")]
    return _source(dtype, kernels)


def codes_source(dtype: str, bits: int) -> str:
    """Return the source of four more kernels; `values` have a dtype of their own, `kind` in tensors/traits.py.

        quantize(const T* x, u8* packed, u8* counts, u8* offsets, void* values, float* levels,
                 const void* selection, const void* equals, const i64* starts, i64 n, i64 outliers, i64 relu, i64 kind)
        add(const u8* counts, u64* totals, i64 n)               a block for `CHUNKS_PER_BLOCK` chunks
        locate(const u8* counts, const u64* totals, i64* starts, i64 n)     likewise
        dequantize(const u8* packed, const u8* counts, const u8* offsets, const void* values, const float* levels,
                   const i64* starts, T* out, i64 n, i64 outliers, i64 relu, i64 kind)

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: 1 to 8.
    """
    return _source(dtype, _CODES, bits)


def has_third_digit(dtype: str) -> bool:
    """Return whether magnitudes of the dtype have more than two digits."""
    return dtype == "float32"


def _source(dtype: str, kernels: list[str], bits: int = 0) -> str:
    T, _ = NUMBERS[dtype]
    texts = []
    for text in kernels:
        residents = 1 if text.startswith(_SCANS) else f"fewbit::residents<{T}>"
        bounds = f'extern "C" __global__ void __launch_bounds__(fewbit::threads, {residents})'
        texts.append(f"{bounds}\n{text.format(T=T, bits=bits)}")
    return "\n".join([pieces(*_PIECES), _HEAD, *texts, "}  // namespace outlier\n"])


_HEAD = """\
namespace outlier {

using fewbit::i64;
using fewbit::Range;
using fewbit::Selection;
using fewbit::u8;
using fewbit::u32;
using fewbit::u64;
"""

_SELECTION = [
    """\
first(const {T}* x, void* selection, i64 n, i64 relu)
{{
    fewbit::count_first_digits<{T}>(x, static_cast<Selection*>(selection), n, relu);
}}
""",
    """\
survey(const {T}* x, void* selection, const void* sample, u32* counts, void* equals, u64* list, u64* listed, i64 room,
       i64 n, i64 rank, i64 relu)
{{
    const fewbit::Chunks chunks = {{counts, static_cast<Range*>(equals), list, listed, room}};
    if (relu)
        fewbit::survey_chunks<{T}, true>(x, static_cast<Selection*>(selection),
                                         static_cast<const Selection*>(sample), chunks, n, rank);
    else
        fewbit::survey_chunks<{T}, false>(x, static_cast<Selection*>(selection),
                                          static_cast<const Selection*>(sample), chunks, n, rank);
}}
""",
    """\
refine(const {T}* x, void* selection, u32* counts, void* equals, u64* list, u64* listed, i64 room, i64 n, i64 relu)
{{
    fewbit::refine_candidates<{T}>(x, static_cast<Selection*>(selection),
                                   {{counts, static_cast<Range*>(equals), list, listed, room}}, n, relu);
}}
""",
    """\
count(const {T}* x, void* selection, u32* counts, void* equals, u64* list, u64* listed, i64 room, i64 n, i64 relu)
{{
    fewbit::count_candidates<{T}>(x, static_cast<Selection*>(selection),
                                  {{counts, static_cast<Range*>(equals), list, listed, room}}, n, relu);
}}
""",
    """\
add(u32* counts, void* equals, u64* list, u64* listed, i64 room, u64* totals, i64 n)
{{
    fewbit::add_outliers({{counts, static_cast<Range*>(equals), list, listed, room}}, totals, n);
}}
""",
    """\
scan(const {T}* x, void* selection, u32* counts, void* equals, u64* list, u64* listed, i64 room, const u64* totals,
     i64* starts, i64 n, i64 relu)
{{
    fewbit::scan_outliers<{T}>(x, static_cast<Selection*>(selection),
                               {{counts, static_cast<Range*>(equals), list, listed, room}}, totals, starts, n, relu);
}}
""",
]

_CODES = [
    """\
quantize(const {T}* x, u8* packed, u8* counts, u8* offsets, void* values, float* levels, const void* selection,
         const void* equals, const i64* starts, i64 n, i64 outliers, i64 relu, i64 kind)
{{
    const Selection* s = static_cast<const Selection*>(selection);
    const Range* of_chunks = static_cast<const Range*>(equals);
    if (relu)
        fewbit::quantize_chunks<{T}, {bits}, true>(x, packed, counts, offsets, values, levels, s, of_chunks, starts, n,
                                                   outliers, int(kind));
    else
        fewbit::quantize_chunks<{T}, {bits}, false>(x, packed, counts, offsets, values, levels, s, of_chunks, starts, n,
                                                    outliers, int(kind));
}}
""",
    """\
add(const u8* counts, u64* totals, i64 n)
{{
    fewbit::add_blocks(counts, totals, n);
}}
""",
    """\
locate(const u8* counts, const u64* totals, i64* starts, i64 n)
{{
    fewbit::locate_outliers(counts, totals, starts, n);
}}
""",
    """\
dequantize(const u8* packed, const u8* counts, const u8* offsets, const void* values, const float* levels,
           const i64* starts, {T}* out, i64 n, i64 outliers, i64 relu, i64 kind)
{{
    if (relu)
        fewbit::dequantize_chunks<{T}, {bits}, true>(packed, counts, offsets, values, levels, starts, out, n, outliers,
                                                     int(kind));
    else
        fewbit::dequantize_chunks<{T}, {bits}, false>(packed, counts, offsets, values, levels, starts, out, n, outliers,
                                                      int(kind));
}}
""",
]
