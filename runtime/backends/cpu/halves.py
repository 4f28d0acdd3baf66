"""float16 in kernels: by the processor's instructions, or by integers where it may have none.

    x = halves.widened(builder, stored)     uint16, the bits of a float16, to float32
    stored = halves.narrowed(builder, x)    float32 to the nearest float16, ties to even; a NaN stays one

Without F16C, on x86 before 2012 or for NUMBA_CPU_NAME=generic, LLVM calls functions of compilers' libraries
(`__extendhfsf2`), which are not in Python's process: such a kernel ended in a segmentation fault. (Numba does not see
that this file has changed: the digest in numba_tools.py does, and activation_kernels.py has to be touched.)
"""

import platform
from typing import Any

from llvmlite import binding, ir
from numba import config

_WORD, _SINGLE = ir.IntType(32), ir.FloatType()
_REBIAS = 112 << 23  # of exponents, in the bits of a float32
_INFINITY, _QUIET = 0x7F800000, 0x00400000


def widened(builder: Any, stored: Any) -> Any:
    """Write the conversion of a float16, given as uint16, to float32."""
    if _has_instructions():
        return builder.fpext(builder.bitcast(stored, ir.HalfType()), _SINGLE)
    bits = builder.zext(stored, _WORD)
    size = builder.and_(bits, _WORD(0x7FFF))
    moved = builder.shl(size, _WORD(13))
    normal = builder.add(moved, _WORD(_REBIAS))
    # Not as a subnormal float32, which `set_flush_denormal` makes 0.
    subnormal = builder.bitcast(builder.fmul(builder.uitofp(size, _SINGLE), _SINGLE(2.0**-24)), _WORD)
    special = builder.or_(moved, _WORD(_INFINITY))
    nan = builder.or_(special, _WORD(_QUIET))
    found = builder.select(builder.icmp_unsigned("<", size, _WORD(0x400)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned(">=", size, _WORD(0x7C00)), special, found)
    found = builder.select(builder.icmp_unsigned(">", size, _WORD(0x7C00)), nan, found)
    sign = builder.shl(builder.and_(bits, _WORD(0x8000)), _WORD(16))
    return builder.bitcast(builder.or_(found, sign), _SINGLE)


def narrowed(builder: Any, x: Any) -> Any:
    """Write the conversion of a float32 to the nearest float16, as uint16."""
    if _has_instructions():
        return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
    bits = builder.bitcast(x, _WORD)
    size = builder.and_(bits, _WORD(0x7FFFFFFF))
    upper = builder.lshr(size, _WORD(13))
    odd = builder.and_(upper, _WORD(1))
    rounded = builder.add(size, builder.add(odd, _WORD(0xFFF)))
    normal = builder.lshr(builder.sub(rounded, _WORD(_REBIAS)), _WORD(13))
    # Beside a half a float32 has the steps of float16's subnormal numbers.
    beside_half = builder.bitcast(builder.fadd(builder.bitcast(size, _SINGLE), _SINGLE(0.5)), _WORD)
    subnormal = builder.sub(beside_half, _WORD(0x3F000000))
    nan = builder.or_(builder.and_(upper, _WORD(0x3FF)), _WORD(0x7E00))
    found = builder.select(builder.icmp_unsigned("<", size, _WORD(0x38800000)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned(">=", size, _WORD(0x477FF000)), _WORD(0x7C00), found)  # 65,520
    found = builder.select(builder.icmp_unsigned(">", size, _WORD(_INFINITY)), nan, found)
    sign = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(0x8000))
    return builder.trunc(builder.or_(found, sign), ir.IntType(16))


def _has_instructions() -> bool:
    """Return whether Numba compiles for a processor known to convert float16 itself."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    asked = getattr(config, "CPU_NAME", None)  # NUMBA_CPU_NAME
    return not asked and bool(binding.get_host_cpu_features().get("f16c", False))
