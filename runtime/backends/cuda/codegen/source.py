"""CUDA C++ source of a table's kernels: compiled by NVRTC, and written by `fewbit emit --target cuda`."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Literal

from .....tables import Table
from .....tables.exporters import check_holds
from .....tables.exporters.c_header import c_name, in_comment
from .....tables.exporters.provenance import provenance
from .formulas import formula
from .lookup import Arithmetic, Search, codes_struct, levels_struct

Kernel = Literal["forward", "encode", "multiply"]

# The C++ name of each torch dtype, and the type of its arithmetic.
NUMBERS: dict[str, tuple[str, Arithmetic]] = {
    "float32": ("float", "float"),
    "float16": ("fewbit::half", "float"),
    "bfloat16": ("fewbit::bfloat16", "float"),
    "float64": ("double", "double"),
}
# Launch configuration, as in kernels.cuh.
THREADS = 256
_PIECES = ("numbers", "packing", "kernels")


def elements_per_block(itemsize: int) -> int:
    """Return the number of elements of `itemsize` bytes that a block processes at once."""
    return THREADS * (8 if itemsize == 8 else 16)


def kernel_source(
    table: Table,
    dtype: str,
    kernels: Sequence[Kernel] = ("encode", "multiply"),
    function: str | None = None,
    parameters: Sequence[float] = (),
    search: Search | None = None,
) -> str:
    """Return the source of some of a table's kernels for one dtype.

    They have C names in the table's namespace, `THREADS` threads a block and these arguments:

        forward(const T* x, T* y, u8* packed, long long n)          of `function`
        encode(const T* x, u8* packed, long long n)
        multiply(const T* grad, const u8* packed, T* result, long long n)

    Args:
        table: the table.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``float64``.
        kernels: which of them to include.
        function: a name in `FORMULAS`, for ``forward`` alone.
        parameters: of the function, as `formula` takes them.
        search: how codes are found; the cheapest way if None.

    Raises:
        FewbitError: there is no formula for `function`.
    """
    T, arithmetic = NUMBERS[dtype]
    of_table = table_text(
        table,
        [arithmetic],
        function,
        parameters,
        search,
        encodes="forward" in kernels or "encode" in kernels,
        multiplies="multiply" in kernels,
    )
    return "\n".join(
        [pieces(*_PIECES), *of_table, *(_KERNELS[name].format(T=T, A=arithmetic) for name in kernels), "}\n"]
    )


def cuda_header(
    table: Table, function: str | None = None, parameters: Sequence[float] = (), search: Search | None = None
) -> str:
    """Return a self-contained CUDA C++17 header with the kernels of a table for all dtypes.

    Its names are in the namespace `c_name(table)`; code shared by all such headers is in the namespace `fewbit`, once.

    Args:
        table: the table.
        function: a name in `FORMULAS`; if None, the header's forward kernel takes f from its user.
        parameters: of the function, as `formula` takes them.
        search: how a code is found; None: the cheapest way that the table allows.

    Raises:
        FewbitError: the table is of kind ``stochastic``, whose codes need f' and random bits as well.
    """
    check_holds("cuda", table.kind)
    name = c_name(table)
    guard = f"{name}_{table.key.rsplit('/', 1)[1]}_CUH".upper()
    text = _HEADER.format(
        name=name,
        provenance="\n".join(f" * {in_comment(line)}" for line in provenance(table)),
        whose="f(x) as torch has it" if function else "f(x) by F",
        f="" if function else ", F",
    )
    kernels = _HEADER_KERNELS.format(default=" = Function<T>" if function else "")
    tables = table_text(table, ["float", "double"], function, parameters, search)
    once = (
        f"#ifndef FEWBIT_CUDA_PIECES\n#define FEWBIT_CUDA_PIECES\n\n{pieces(*_PIECES)}\n#endif  // FEWBIT_CUDA_PIECES\n"
    )
    begin, end = f"#ifndef {guard}\n#define {guard}\n", f"}}  // namespace {name}\n\n#endif\n"
    return "\n".join([text, begin, once, *tables, kernels, end])


_LAUNCHED = 'extern "C" __global__ void __launch_bounds__(fewbit::threads, fewbit::residents<{T}>)\n'
_KERNELS: dict[Kernel, str] = {
    "forward": f"""\
{_LAUNCHED}forward(const {{T}}* x, {{T}}* y, fewbit::u8* packed, long long n)
{{{{
    fewbit::encode_tiles<{{T}}, Codes<{{A}}>, Function<{{T}}>>(x, y, packed, n);
}}}}
""",
    "encode": f"""\
{_LAUNCHED}encode(const {{T}}* x, fewbit::u8* packed, long long n)
{{{{
    fewbit::encode_tiles<{{T}}, Codes<{{A}}>, fewbit::CodeAlone>(x, nullptr, packed, n);
}}}}
""",
    "multiply": f"""\
{_LAUNCHED}multiply(const {{T}}* grad, const fewbit::u8* packed, {{T}}* result, long long n)
{{{{
    fewbit::multiply_tiles<{{T}}, Levels<{{A}}>>(grad, packed, result, n);
}}}}
""",
}

_HEADER = """\
/* A few-bit activation: f(x) forward, the code of x kept for backward, and a gradient times the table's level.
 *
{provenance}
 *
 * T is float, double, fewbit::half or fewbit::bfloat16; the last two are the 16 bits of __half and __nv_bfloat16.
 * x, y, grad and result may lie at any address, packed at a multiple of 16; n may be any number.
 *
 *   {name}::forward<T{f}>    x -> y, packed            {whose}; (n + 7) / 8 * bits bytes of packed code
 *   {name}::encode<T>     x -> packed               the code alone
 *   {name}::backward<T>   grad, packed -> result    the gradient of x
 *
 *   {name}::forward<T{f}><<<fewbit::blocks<T>(n), fewbit::threads, 0, stream>>>(x, y, packed, n);
 *
 * C++17, sm_75 or later. Compile without --use_fast_math: NaN belongs to the last interval.
 */"""

_HEADER_KERNELS = """\
template <class T, class F{default}>
__global__ void __launch_bounds__(fewbit::threads, fewbit::residents<T>)
forward(const T* x, T* y, unsigned char* packed, long long n)
{{
    fewbit::encode_tiles<T, Codes<fewbit::arithmetic<T>>, F>(x, y, packed, n);
}}

template <class T>
__global__ void __launch_bounds__(fewbit::threads, fewbit::residents<T>)
encode(const T* x, unsigned char* packed, long long n)
{{
    fewbit::encode_tiles<T, Codes<fewbit::arithmetic<T>>, fewbit::CodeAlone>(x, nullptr, packed, n);
}}

template <class T>
__global__ void __launch_bounds__(fewbit::threads, fewbit::residents<T>)
backward(const T* grad, const unsigned char* packed, T* result, long long n)
{{
    fewbit::multiply_tiles<T, Levels<fewbit::arithmetic<T>>>(grad, packed, result, n);
}}
"""

_FUNCTION = """\
// f(x), as torch's CUDA kernels compute it.
template <class T> struct Function {{
    static constexpr bool writes = true;
    using A = fewbit::arithmetic<T>;
    static __device__ A of(A x)
    {{
{body}
    }}
}};
"""


@cache
def pieces(*names: str) -> str:
    """Return the code of these files, which kernels share, in an order in which each finds what it uses."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cuh").read_text() for name in names)


def table_text(
    table: Table,
    arithmetics: Iterable[Arithmetic],
    function: str | None,
    parameters: Sequence[float],
    search: Search | None = None,
    encodes: bool = True,
    multiplies: bool = True,
) -> Iterable[str]:
    """Yield the table's own namespace, not yet closed."""
    yield f"// ---- {in_comment(table.activation)} {'-' * max(0, 108 - len(table.activation))}\n"
    yield f"namespace {c_name(table)} {{\n\nusing fewbit::rounded;\nusing fewbit::u8;\nusing fewbit::u32;\n"
    if function is not None:
        yield _FUNCTION.format(body=indent(formula(function, parameters), " " * 8))
    if encodes:
        yield "template <class A> struct Codes;\n"
        yield from (codes_struct(table, arithmetic, search) for arithmetic in arithmetics)
    if multiplies:
        yield "template <class A> struct Levels;\n"
        yield from (levels_struct(table, arithmetic) for arithmetic in arithmetics)
