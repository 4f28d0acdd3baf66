"""CUDA C++ source of the kernel that rounds at random to a table's levels, for one dtype and number of bits."""

from collections.abc import Sequence

from .....tables import Table
from .source import NUMBERS, THREADS, pieces, table_text

ELEMENTS_PER_BLOCK = THREADS * 8  # a thread has the 8 elements whose codes are whole bytes
_PIECES = ("numbers", "packing", "kernels", "eights", "philox", "gather", "rounding")


def rounding_source(
    dtype: str, bits: int, table: Table | None = None, function: str = "", parameters: Sequence[float] = ()
) -> str:
    """Return the source of one kernel with a C name in the namespace `rounding`, `THREADS` threads a block:

        encode(const T* x, u8* packed, const float* slope, const float* base, const float* jumps, i64 n, i64 last,
               i64 jump_count, i64 low, i64 high, i64 inverse, i64 top, i64 seed, const i64* drawn)

    With a table one in the table's namespace, which writes y = f(x) too: forward(const T* x, T* y, u8* packed, …).

    The arguments are those of `RoundingTable`; low, high and inverse are the bits of a float32; `drawn` is
    the address of the seed in the GPU's memory, or null.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        bits: of a code.
        table: whose name the namespace has, or None.
        function, parameters: f, a name in `FORMULAS`.
    """
    T, arithmetic = NUMBERS[dtype]
    if table is None:
        return "\n".join([pieces(*_PIECES), _ENCODE.format(T=T, bits=bits)])
    of_table = table_text(table, [arithmetic], function, parameters, encodes=False, multiplies=False)
    return "\n".join([pieces(*_PIECES), *of_table, _FORWARD.format(T=T, bits=bits), "}\n"])


_LINES = """\
const float* slope, const float* base, const float* jumps, i64 n, i64 last, i64 jump_count, i64 low, i64 high,
       i64 inverse, i64 top, i64 seed, const i64* drawn)
{{
    const fewbit::Lines lines = {{__uint_as_float(u32(low)), __uint_as_float(u32(high)), __uint_as_float(u32(inverse)),
                                 slope, base, jumps, int(last), int(jump_count)}};
"""

_ENCODE = f"""\
namespace rounding {{{{

using fewbit::i64;
using fewbit::u8;
using fewbit::u32;

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{{T}}>)
encode(const {{T}}* x, u8* packed, {_LINES}\
    fewbit::round_at_random<{{T}}, {{bits}}, fewbit::CodeAlone>(x, nullptr, packed, n, lines, u32(top),
                                                           fewbit::key_of(seed, drawn));
}}}}

}}}}  // namespace rounding
"""

_FORWARD = f"""\
using fewbit::i64;

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{{T}}>)
forward(const {{T}}* x, {{T}}* y, u8* packed, {_LINES}\
    fewbit::round_at_random<{{T}}, {{bits}}, Function<{{T}}>>(x, y, packed, n, lines, u32(top),
                                                      fewbit::key_of(seed, drawn));
}}}}
"""
