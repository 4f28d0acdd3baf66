"""CUDA C++ source of the kernels of a gated linear unit, for one activation, table, dtype and plan."""

from collections.abc import Sequence

from .....tables import Table
from .source import NUMBERS, THREADS, pieces, table_text

ELEMENTS_PER_BLOCK = THREADS * 8  # a thread has the 8 elements whose codes are whole bytes
_PIECES = (
    "numbers",
    "packing",
    "kernels",
    "eights",
    "philox",
    "per_group",
    "extremes",
    "gather",
    "per_group_slots",
    "glu",
)


def glu_source(
    table: Table, dtype: str, function: str, parameters: Sequence[float], up_bits: int, act_bits: int
) -> str:
    """Return the source of two kernels with C names in the table's namespace, `THREADS` threads a block:

        glu_forward(const T* gate, const T* up, T* h, u8* codes, u8* up_packed, u8* act_packed, u16* parameters,
                    i64 n, i64 up_seed, const i64* up_drawn, i64 act_seed, const i64* act_drawn)
        glu_backward(const T* grad, const u8* codes, const u8* up_packed, const u8* act_packed, const u16* parameters,
                     T* d_gate, T* d_up, T* h, i64 n)          a null pointer is not written

    The seeds are those numbers, or what lies at the addresses in the GPU's memory.

    Args:
        table: of act'.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        function, parameters: act, a name in `FORMULAS`.
        up_bits, act_bits: of the copies of up and act(gate).

    Raises:
        FewbitError: there is no formula for `function`.
    """
    T, arithmetic = NUMBERS[dtype]
    of_table = table_text(table, [arithmetic], function, parameters)
    kernels = _KERNELS.format(T=T, A=arithmetic, up_bits=up_bits, act_bits=act_bits)
    return "\n".join([pieces(*_PIECES), *of_table, kernels, "}\n"])


_KERNELS = """\
using fewbit::i64;
using fewbit::u16;

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
glu_forward(const {T}* gate, const {T}* up, {T}* h, u8* codes, u8* up_packed, u8* act_packed, u16* parameters, i64 n,
            i64 up_seed, const i64* up_drawn, i64 act_seed, const i64* act_drawn)
{{
    fewbit::glu_forward_groups<{T}, Codes<{A}>, Function<{T}>, {up_bits}, {act_bits}>(
        gate, up, h, codes, up_packed, act_packed, parameters, n, fewbit::key_of(up_seed, up_drawn),
        fewbit::key_of(act_seed, act_drawn));
}}

extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)
glu_backward(const {T}* grad, const u8* codes, const u8* up_packed, const u8* act_packed, const u16* parameters,
             {T}* d_gate, {T}* d_up, {T}* h, i64 n)
{{
    fewbit::glu_backward_groups<{T}, Levels<{A}>, {up_bits}, {act_bits}>(
        grad, codes, up_packed, act_packed, parameters, d_gate, d_up, h, n);
}}
"""
