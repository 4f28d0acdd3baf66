"""The generated CUDA kernels on the CPU: their source built by g++ behind host_cuda.h, and called on torch tensors."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.backends.cuda.codegen import THREADS, compiler, kernel_source
from fewbit.runtime.backends.cuda.codegen.fixed_point import fixed_point_source
from fewbit.runtime.backends.cuda.codegen.following import following_source
from fewbit.runtime.backends.cuda.codegen.glu import glu_source
from fewbit.runtime.backends.cuda.codegen.keys import keys_source
from fewbit.runtime.backends.cuda.codegen.outlier import codes_source, selection_source
from fewbit.runtime.backends.cuda.codegen.per_group import per_group_source
from fewbit.runtime.backends.cuda.codegen.rotated import rotated_source
from fewbit.runtime.backends.cuda.codegen.rounding import rounding_source
from fewbit.runtime.tensors.packing import packed_size
from fewbit.runtime.tensors.table_registry import table_of
from fewbit.tables.exporters.c_header import c_name

COMPILER = shutil.which("g++")
needs_gxx = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")


def _has_nvrtc():
    try:
        compiler.compiler_version()
    except FewbitError:
        return False
    return compiler.has_compiler()


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="no cuda-core with NVRTC: pip install 'cuda-core[cu13]'")
_FOLDER = Path(__file__).parent
_BUILT = _FOLDER.parents[1] / "build" / "host-kernels"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def of_each_architecture(bits):
    """Return (dtype, bits, architecture): each dtype of `bits` for each architecture, its numbers of bits in turn.

    Two dtypes of the same numbers begin with different ones, so that each number meets each architecture.
    """
    return [
        (dtype, choices[(i + j) % len(choices)], arch)
        for i, (dtype, choices) in enumerate(bits.items())
        for j, arch in enumerate(ARCHITECTURES)
    ]


def registers_without_spills(source, arch, kernels):
    """Compile a source by NVRTC: it has these kernels, and none has memory of its own; return the registers of each."""
    code, usages = compiler.compile_source(source, arch)
    assert code and {usage.kernel for usage in usages} == kernels
    assert sum(usage.spilled + usage.stack for usage in usages) == 0
    return {usage.kernel: usage.registers for usage in usages}


# As a GPU computes: a product and a sum are not contracted but where the source says so.
OPTIONS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-shared", "-fPIC", "-Wall", "-Werror"]
OPTIONS += ["-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-div-by-zero", f"-I{_FOLDER}"]
# g++ calls __tsan_read4 and the like, which are host_races.cpp's: libtsan is left out with the other libraries. Each
# library runs a few times: it takes less to build without -O1 than it runs longer.
WATCHED = ["-O0", "-fsanitize=thread", "-DHOST_RACES", "-g1", "-nodefaultlibs"]

_ENTRIES = """
using namespace {name};

extern "C" void run_encode(unsigned blocks, const {T}* x, unsigned char* packed, long long n)
{{
    host::launch(blocks, {threads}, [=] {{ encode(x, packed, n); }});
}}

extern "C" void run_multiply(unsigned blocks, const {T}* grad, const unsigned char* packed, {T}* result, long long n)
{{
    host::launch(blocks, {threads}, [=] {{ multiply(grad, packed, result, n); }});
}}
"""
_FORWARD = """
extern "C" void run_forward(unsigned blocks, const {T}* x, {T}* y, unsigned char* packed, long long n)
{{
    host::launch(blocks, {threads}, [=] {{ forward(x, y, packed, n); }});
}}
"""
TYPES = {"float32": "float", "float64": "double", "float16": "fewbit::half", "bfloat16": "fewbit::bfloat16"}
GUARD = 0xA5  # what lies around every output, and must still lie there afterwards


class HostKernels:
    """A table's kernels for one dtype."""

    def __init__(self, table, dtype, function=None, parameters=(), search=None):
        assert COMPILER, "no g++"
        self.bits = table.bits
        name = str(dtype).removeprefix("torch.")
        words = {"name": c_name(table), "T": TYPES[name], "threads": THREADS}
        kernels = ("encode", "multiply", *(["forward"] if function else []))
        source = '#include "host_cuda.h"\n' + kernel_source(table, name, kernels, function, parameters, search)
        source += '\n#include "host_numbers.h"\n' + (_ENTRIES + _FORWARD * (function is not None)).format(**words)
        self.library = built(source)

    def encode(self, x, blocks=1):
        packed = guarded(packed_size(x.numel(), self.bits), torch.uint8)
        self._run("encode", blocks, x, packed, x.numel())
        return unharmed(packed)

    def forward(self, x, blocks=1, offset=0):
        y = guarded(x.numel(), x.dtype, offset)
        packed = guarded(packed_size(x.numel(), self.bits), torch.uint8)
        self._run("forward", blocks, x, y, packed, x.numel())
        return unharmed(y), unharmed(packed)

    def multiply(self, grad, packed, blocks=1, offset=0):
        result = guarded(grad.numel(), grad.dtype, offset)
        aligned = guarded(packed.numel(), torch.uint8)
        aligned.copy_(packed)
        self._run("multiply", blocks, grad, aligned, result, grad.numel())
        return unharmed(result)

    def _run(self, name, blocks, *tensors_and_n):
        *tensors, n = tensors_and_n
        self.run(name, blocks, *(tensor.data_ptr() for tensor in tensors), n)

    def run(self, name, blocks, *addresses_and_n):
        *addresses, n = addresses_and_n
        pointers = map(ctypes.c_void_p, addresses)
        getattr(self.library, f"run_{name}")(ctypes.c_uint(blocks), *pointers, ctypes.c_longlong(n))


def _options(watched):
    return OPTIONS + WATCHED * watched


@functools.cache
def _precompiled(watched):
    """The folder of host_cuda.h as g++ has read it: half of what a library takes to build. It goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="host-cuda-")
    header = ["-x", "c++-header", str(_FOLDER / "host_cuda.h"), "-o", f"{folder.name}/host_cuda.h.gch"]
    subprocess.run([COMPILER, *(option for option in _options(watched) if option != "-shared"), *header], check=True)
    if watched:
        checker = ["-std=c++17", "-O2", "-fPIC", "-c", str(_FOLDER / "host_races.cpp"), "-o", f"{folder.name}/races.o"]
        subprocess.run([COMPILER, *checker], check=True)
    return folder


def compile_source(source, path, watched=False):
    """Build a source by g++."""
    path.with_suffix(".cpp").write_text(source)
    folder = _precompiled(watched).name
    command = [COMPILER, f"-I{folder}", *_options(watched), str(path.with_suffix(".cpp")), "-o", str(path)]
    command += [f"{folder}/races.o", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc"] * watched
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


@functools.cache
def _environment(watched):
    """What a library depends on beside its source."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    names = ("host_cuda.h", "host_numbers.h", *("host_races.h", "host_races.cpp") * watched)
    return b"".join([version, repr(_options(watched)).encode(), *((_FOLDER / name).read_bytes() for name in names)])


def built(source, watched=False):
    """The library that g++ makes of a source, or made of it before: hundreds take a second each."""
    path = _BUILT / f"{hashlib.sha256(_environment(watched) + source.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
            compile_source(source, Path(folder) / "kernels.so", watched)
            os.replace(Path(folder) / "kernels.so", path)
    return ctypes.CDLL(str(path))


_PER_GROUP = """
extern "C" void run_quantize(unsigned blocks, const {T}* x, unsigned char* packed, unsigned short* minima,
    unsigned short* ranges, long long N, long long D, const unsigned char* bits, const long long* starts,
    long long size, long long G, long long seed, const long long* drawn, const float* lines, long long width,
    long long shape)
{{
    host::launch(blocks, {threads}, [=] {{
        per_group::quantize(x, packed, minima, ranges, N, D, bits, starts, size, G, seed, drawn, lines, width, shape);
    }});
}}

extern "C" void run_dequantize(unsigned blocks, const unsigned char* packed, const unsigned short* minima,
    const unsigned short* ranges, {T}* out, long long N, long long D, const unsigned char* bits,
    const long long* starts, long long size, long long G, const float* lines, long long width, long long shape)
{{
    host::launch(blocks, {threads}, [=] {{
        per_group::dequantize(packed, minima, ranges, out, N, D, bits, starts, size, G, lines, width, shape);
    }});
}}
"""


@functools.cache
def per_group_library(dtype, bits, bent):
    """The per-group quantizer's kernels for a dtype and a number of bits, or None for bits of each sample."""
    assert COMPILER, "no g++"
    source = '#include "host_cuda.h"\n' + per_group_source(dtype, bits, bent) + '\n#include "host_numbers.h"\n'
    return built(source + _PER_GROUP.format(T=TYPES[dtype], threads=THREADS))


def start_per_group(dtype, bits, name, blocks, *arguments):
    """Run such a kernel with the arguments of a launch."""
    library = per_group_library(dtype, bits, arguments[-1] != 0)
    getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


_FIXED_POINT = {
    "tabulate": "gamma, gamma_kind, beta, beta_kind, table, C, all",
    "quantize": "x, packed, origin, inverse, zero, n, inner, C",
    "dequantize": "packed, out, origin, step, zero, n, inner, C",
    "encode": "A, x, packed, table, mean, r, n, inner, C, leak",
    "decode": "packed, out, table, n, inner, C, leak",
    "sums": "packed, gradient, table, sums, shares, n, inner, C, leak",
    "finish": "sums, results, scale, r, shares, elements, by_batch, C",
    "normalize": "packed, gradient, table, results, n, inner, C, leak",
}
_POINTERS = {
    **dict.fromkeys(("gamma", "beta"), "void*"),
    "scale": "double*",
    **dict.fromkeys(("x", "A", "out", "gradient"), "{T}*"),
    **dict.fromkeys(("table", "origin", "inverse", "step", "mean", "r", "sums", "results"), "float*"),
    "packed": "unsigned char*",
    "zero": "int*",
}


@functools.cache
def fixed_point_library(dtype, bits):
    """The kernels of the fixed-point quantizer and of pre-activation layers for a dtype and a number of bits."""
    assert COMPILER, "no g++"
    source = '#include "host_cuda.h"\n' + fixed_point_source(dtype, bits) + '\n#include "host_numbers.h"\n'
    for name, arguments in _FIXED_POINT.items():
        source += _entry(f"fixed_point::{name}", name, arguments, _POINTERS, dtype)
    return built(source)


def _entry(kernel, name, arguments, pointers, dtype):
    """A C function that launches a kernel."""
    words = [(pointers.get(word, "long long").format(T=TYPES[dtype]), word) for word in arguments.split(", ")]
    declared = ", ".join(f"{kind} {word}" for kind, word in words)
    call = f"host::launch(blocks, {THREADS}, [=] {{ {kernel}({arguments}); }});"
    return f'extern "C" void run_{name}(unsigned blocks, {declared})\n{{\n    {call}\n}}\n'


def start_fixed_point(dtype, bits, name, blocks, *arguments):
    """Run such a kernel with the arguments of a launch."""
    library = fixed_point_library(dtype, bits)
    getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


_OUTLIER = {
    "first": "x, selection, n, relu",
    "survey": "x, selection, sample, counts, equals, list, listed, room, n, rank, relu",
    "refine": "x, selection, counts, equals, list, listed, room, n, relu",
    "count": "x, selection, counts, equals, list, listed, room, n, relu",
    "add": "counts, equals, list, listed, room, totals, n",
    "scan": "x, selection, counts, equals, list, listed, room, totals, starts, n, relu",
}
_OUTLIER_CODES = {
    "quantize": "x, packed, bytes, offsets, values, levels, selection, equals, starts, n, outliers, relu, kind",
    "add": "bytes, totals, n",
    "locate": "bytes, totals, starts, n",
    "dequantize": "packed, bytes, offsets, values, levels, starts, out, n, outliers, relu, kind",
}
_OUTLIER_POINTERS = {
    **dict.fromkeys(("x", "out"), "{T}*"),
    **dict.fromkeys(("selection", "sample", "equals", "values"), "void*"),
    **dict.fromkeys(("packed", "bytes", "offsets"), "unsigned char*"),
    **dict.fromkeys(("list", "listed", "totals"), "unsigned long long*"),
    "counts": "unsigned*",
    "levels": "float*",
    "starts": "long long*",
}


@functools.cache
def outlier_library(dtype, bits):
    """The outlier quantizer's kernels for a dtype: those of codes for a number of bits, else of selection."""
    assert COMPILER, "no g++"
    text = selection_source(dtype) if bits is None else codes_source(dtype, bits)
    source = '#include "host_cuda.h"\n' + text + '\n#include "host_numbers.h"\n'
    for name, arguments in (_OUTLIER if bits is None else _OUTLIER_CODES).items():
        if f"\n{name}(" in text:
            source += _entry(f"outlier::{name}", name, arguments, _OUTLIER_POINTERS, dtype)
    return built(source)


def start_outlier(dtype, bits, name, blocks, *arguments):
    """Run such a kernel with the arguments of a launch."""
    library = outlier_library(dtype, bits)
    getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


_ROUNDING = "x, packed, slope, base, jumps, n, last, jump_count, low, high, inverse, top, seed, drawn"
_ROUNDING_POINTERS = {
    **dict.fromkeys(("x", "y"), "{T}*"),
    "packed": "unsigned char*",
    "drawn": "long long*",
    **dict.fromkeys(("slope", "base", "jumps"), "float*"),
}


@functools.cache
def rounding_library(dtype, bits, forward):
    """The kernel that rounds at random to a table's levels, or one that writes f(x) too: (table, f, its parameters)."""
    assert COMPILER, "no g++"
    name, arguments, of_table = "encode", _ROUNDING, ()
    if forward is not None:
        key, *function = forward
        name, arguments, of_table = "forward", _ROUNDING.replace("x, ", "x, y, ", 1), (table_of(key), *function)
    namespace = c_name(of_table[0]) if of_table else "rounding"
    source = '#include "host_cuda.h"\n' + rounding_source(dtype, bits, *of_table) + '\n#include "host_numbers.h"\n'
    return built(source + _entry(f"{namespace}::{name}", name, arguments, _ROUNDING_POINTERS, dtype))


def start_rounding(dtype, bits, forward, blocks, *arguments):
    """Run that kernel with the arguments of a launch."""
    library = rounding_library(dtype, bits, forward)
    run = library.run_encode if forward is None else library.run_forward
    run(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


_FOLLOWING = {
    "encode": "x, packed, n, boundaries, count, codes",
    "multiply": "grad, packed, result, n, levels, count",
}
_FOLLOWING_POINTERS = {
    **dict.fromkeys(("x", "boundaries", "grad", "result"), "{T}*"),
    **dict.fromkeys(("packed", "codes"), "unsigned char*"),
    "levels": "float*",
}


@functools.cache
def following_library(dtype, bits):
    """The kernels whose table lies in memory, for a dtype and a number of bits."""
    assert COMPILER, "no g++"
    source = '#include "host_cuda.h"\n' + following_source(dtype, bits) + '\n#include "host_numbers.h"\n'
    for name, arguments in _FOLLOWING.items():
        source += _entry(f"following::{name}", name, arguments, _FOLLOWING_POINTERS, dtype)
    return built(source)


def start_following(dtype, bits, name, *arguments):
    """Run such a kernel with the arguments of a launch."""
    library = following_library(dtype, bits)
    getattr(library, f"run_{name}")(ctypes.c_uint(2), *map(ctypes.c_longlong, arguments))


@functools.cache
def keys_library():
    """The kernels of a stream of keys."""
    assert COMPILER, "no g++"
    source = '#include "host_cuda.h"\n' + keys_source() + "\n"
    for name, arguments in {"draw": "seeds, count", "move": "seed, drawn, begins"}.items():
        source += _entry(f"keys::{name}", name, arguments, {"seeds": "long long*"}, "float32")
    return built(source)


def start_keys(name, *arguments):
    """Run such a kernel with the arguments of a launch."""
    getattr(keys_library(), f"run_{name}")(ctypes.c_uint(2), *map(ctypes.c_longlong, arguments))


_PIECE = "rows, D, start, size, count, first, of_row, counters"
_ROTATED = {
    "quantize": f"x, packed, scales, {_PIECE}, turns, unbiased, levels, edges, seed, drawn",
    "dequantize": f"packed, scales, out, {_PIECE}, turns, levels, seed, drawn",
}
_ROTATED_POINTERS = {
    **dict.fromkeys(("x", "out"), "{T}*"),
    **dict.fromkeys(("levels", "edges"), "float*"),
    "packed": "unsigned char*",
    "scales": "unsigned short*",
    "drawn": "long long*",
}


@functools.cache
def rotated_library(dtype, bits, size):
    """The kernels of rotated codes for a dtype, a number of bits and a size of groups."""
    assert COMPILER, "no g++"
    source = '#include "host_cuda.h"\n' + rotated_source(dtype, bits, size) + '\n#include "host_numbers.h"\n'
    for name, arguments in _ROTATED.items():
        source += _entry(f"rotated::{name}", name, arguments, _ROTATED_POINTERS, dtype)
    return built(source)


def start_rotated(dtype, bits, size, name, blocks, *arguments):
    """Run such a kernel with the arguments of a launch."""
    library = rotated_library(dtype, bits, size)
    getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


_GLU = """
extern "C" void run_glu_forward(unsigned blocks, const {T}* gate, const {T}* up, {T}* h, unsigned char* codes,
    unsigned char* up_packed, unsigned char* act_packed, unsigned short* parameters, long long n, long long up_seed,
    const long long* up_drawn, long long act_seed, const long long* act_drawn)
{{
    host::launch(blocks, {threads}, [=] {{
        {name}::glu_forward(gate, up, h, codes, up_packed, act_packed, parameters, n,
            up_seed, up_drawn, act_seed, act_drawn);
    }});
}}

extern "C" void run_glu_backward(unsigned blocks, const {T}* grad, const unsigned char* codes,
    const unsigned char* up_packed, const unsigned char* act_packed, const unsigned short* parameters, {T}* d_gate,
    {T}* d_up, {T}* h, long long n)
{{
    host::launch(blocks, {threads}, [=] {{
        {name}::glu_backward(grad, codes, up_packed, act_packed, parameters, d_gate, d_up, h, n);
    }});
}}
"""


@functools.cache
def glu_library(dtype, plan):
    """A gated linear unit's kernels for a dtype and a plan (function, parameters, key of a table, bits of copies)."""
    assert COMPILER, "no g++"
    function, parameters, key, up_bits, act_bits = plan
    source = glu_source(table_of(key), dtype, function, parameters, up_bits, act_bits)
    words = {"name": c_name(table_of(key)), "T": TYPES[dtype], "threads": THREADS}
    return built('#include "host_cuda.h"\n' + source + '\n#include "host_numbers.h"\n' + _GLU.format(**words))


def start_glu(dtype, plan, name, blocks, *arguments):
    """Run such a kernel with the arguments of a launch."""
    getattr(glu_library(dtype, plan), f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


def at_offset(x, offset):
    """`x` in memory that begins `offset` elements after a multiple of 64 bytes."""
    return guarded(x.numel(), x.dtype, offset).copy_(x)


def guarded(n, dtype, offset=0):
    """n elements, `offset` of them after a multiple of 64 bytes, among bytes that nobody may change."""
    size = dtype.itemsize
    whole = torch.full((n * size + 64 * 4,), GUARD, dtype=torch.uint8)
    begin = 64 + -whole.data_ptr() % 64 + offset * size
    result = whole[begin : begin + n * size].view(dtype)
    result.whole, result.begin = whole, begin
    return result


def unharmed(result):
    before, after = result.whole[: result.begin], result.whole[result.begin + result.numel() * result.element_size() :]
    assert (before == GUARD).all() and (after == GUARD).all(), "written outside"
    return result
