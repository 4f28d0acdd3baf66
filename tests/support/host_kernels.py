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
from fewbit.runtime.tensors.levels import table_of
from fewbit.runtime.tensors.packing import packed_size
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


_NUMBERS = "N, D, bits, starts, size, G"
_PIECE = "rows, D, start, size, count, first, of_row, counters"
_TABLE = "slope, base, jumps, n, last, jump_count, low, high, inverse, top, seed, drawn"
_PARTS = "codes, up_packed, act_packed, parameters"
_CANDIDATES = "selection, counts, equals, list, listed, room"
# The arguments of each family's kernels: a function has those that its source has.
_KERNELS = {
    "per_group": {
        "quantize": f"x, packed, minima, ranges, {_NUMBERS}, seed, drawn, lines, width, shape",
        "dequantize": f"packed, minima, ranges, out, {_NUMBERS}, lines, width, shape",
    },
    "fixed_point": {  # and of pre-activation layers
        "tabulate": "gamma, gamma_kind, beta, beta_kind, table, C, all",
        "quantize": "x, packed, origin, inverse, zero, n, inner, C",
        "dequantize": "packed, out, origin, step, zero, n, inner, C",
        "encode": "A, x, packed, table, mean, r, n, inner, C, leak",
        "decode": "packed, out, table, n, inner, C, leak",
        "sums": "packed, gradient, table, sums, shares, n, inner, C, leak",
        "finish": "sums, results, scale, r, shares, elements, by_batch, C",
        "normalize": "packed, gradient, table, results, n, inner, C, leak",
    },
    "outlier": {  # of selection
        "first": "x, selection, n, relu",
        "survey": "x, selection, sample, counts, equals, list, listed, room, n, rank, relu",
        "refine": f"x, {_CANDIDATES}, n, relu",
        "count": f"x, {_CANDIDATES}, n, relu",
        "add": "counts, equals, list, listed, room, totals, n",
        "scan": f"x, {_CANDIDATES}, totals, starts, n, relu",
    },
    "outlier, codes": {
        "quantize": "x, packed, bytes, offsets, values, levels, selection, equals, starts, n, outliers, relu, kind",
        "add": "bytes, totals, n",
        "locate": "bytes, totals, starts, n",
        "dequantize": "packed, bytes, offsets, values, levels, starts, out, n, outliers, relu, kind",
    },
    "rounding": {"encode": f"x, packed, {_TABLE}"},
    "rounding, with f(x)": {"forward": f"x, y, packed, {_TABLE}"},
    "following": {  # whose table lies in memory
        "encode": "x, packed, n, boundaries, count, codes",
        "multiply": "grad, packed, result, n, levels, count",
    },
    "keys": {"draw": "seeds, count", "move": "seed, drawn, begins"},
    "rotated": {
        "quantize": f"x, packed, scales, {_PIECE}, turns, unbiased, levels, edges, seed, drawn",
        "dequantize": f"packed, scales, out, {_PIECE}, turns, levels, seed, drawn",
    },
    "glu": {
        "glu_forward": f"gate, up, h, {_PARTS}, n, up_seed, up_drawn, act_seed, act_drawn",
        "glu_backward": f"grad, {_PARTS}, d_gate, d_up, h, n",
    },
}
# What those that are pointers point to; all others are long long.
_POINTERS = {
    "{T}*": "x y A out gradient grad result boundaries gate up h d_gate d_up",
    "void*": "gamma beta selection sample equals values",
    "unsigned char*": "packed bits bytes offsets codes up_packed act_packed",
    "unsigned short*": "minima ranges scales parameters",
    "unsigned*": "counts",
    "int*": "zero",
    "long long*": "starts drawn seeds up_drawn act_drawn",
    "unsigned long long*": "list listed totals",
    "float*": "lines table origin inverse step mean r sums results levels edges slope base jumps",
    "double*": "scale",
}
_NO_POINTERS = {"rounding": ("inverse",), "rounding, with f(x)": ("inverse",), "keys": ("drawn",)}


def family_source(family, text, dtype, namespace=None):
    """Return a source with a C function for each kernel of the family that is in `text`, which launches it."""
    source = '#include "host_cuda.h"\n' + text + '\n#include "host_numbers.h"\n'
    kinds = {word: kind.format(T=TYPES[dtype]) for kind, words in _POINTERS.items() for word in words.split()}
    kinds |= dict.fromkeys(_NO_POINTERS.get(family, ()), "long long")
    for name, arguments in _KERNELS[family].items():
        if f"{name}(" in text:
            declared = ", ".join(f"{kinds.get(word, 'long long')} {word}" for word in arguments.split(", "))
            kernel = f"{namespace or family.partition(',')[0]}::{name}"
            call = f"host::launch(blocks, {THREADS}, [=] {{ {kernel}({arguments}); }});"
            source += f'extern "C" void run_{name}(unsigned blocks, {declared})\n{{\n    {call}\n}}\n'
    return source


@functools.cache
def family_library(family, dtype, *of):
    """The kernels of a family for a dtype and what else its source takes."""
    assert COMPILER, "no g++"
    namespace = None
    if family == "glu":
        function, parameters, key, up_bits, act_bits = of[0]
        text, namespace = (
            glu_source(table_of(key), dtype, function, parameters, up_bits, act_bits),
            c_name(table_of(key)),
        )
    elif family == "rounding, with f(x)":
        bits, key, *function = of
        text, namespace = rounding_source(dtype, bits, table_of(key), *function), c_name(table_of(key))
    else:
        text = _SOURCES[family](dtype, *of)
    return built(family_source(family, text, dtype, namespace))


_SOURCES = {
    "per_group": per_group_source,
    "fixed_point": fixed_point_source,
    "outlier": selection_source,
    "outlier, codes": codes_source,
    "rounding": rounding_source,
    "following": following_source,
    "keys": lambda dtype: keys_source(),
    "rotated": rotated_source,
}


def _start(library, name, blocks, arguments):
    """Run a kernel with the arguments of a launch."""
    getattr(library, f"run_{name}")(ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))


def start_per_group(dtype, bits, name, blocks, *arguments):
    """With a number of bits, or None for bits of each sample."""
    _start(family_library("per_group", dtype, bits, arguments[-1] != 0), name, blocks, arguments)


def start_fixed_point(dtype, bits, name, blocks, *arguments):
    _start(family_library("fixed_point", dtype, bits), name, blocks, arguments)


def start_outlier(dtype, bits, name, blocks, *arguments):
    """A kernel of codes of a number of bits, or of selection without one."""
    library = family_library("outlier", dtype) if bits is None else family_library("outlier, codes", dtype, bits)
    _start(library, name, blocks, arguments)


def start_rounding(dtype, bits, forward, blocks, *arguments):
    """The kernel that rounds at random to a table's levels, or one that writes f(x) too: (table, f, its parameters)."""
    if forward is None:
        _start(family_library("rounding", dtype, bits), "encode", blocks, arguments)
    else:
        _start(family_library("rounding, with f(x)", dtype, bits, *forward), "forward", blocks, arguments)


def start_following(dtype, bits, name, *arguments):
    _start(family_library("following", dtype, bits), name, 2, arguments)


def start_keys(name, *arguments):
    _start(family_library("keys", "float32"), name, 2, arguments)


def start_rotated(dtype, bits, size, name, blocks, *arguments):
    _start(family_library("rotated", dtype, bits, size), name, blocks, arguments)


def start_glu(dtype, plan, name, blocks, *arguments):
    """Of a plan: function, parameters, key of a table, bits of copies."""
    _start(family_library("glu", dtype, plan), name, blocks, arguments)


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
