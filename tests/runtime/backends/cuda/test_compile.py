"""NVRTC compiles the kernels to machine code without a GPU, and nothing spills; the cache; nvcc takes the header.

All kernels there are: `fewbit bench kernels`, ten minutes on two cores.
"""

import importlib.util
import shutil
import subprocess

import fewbit
import pytest
from fewbit.plots.bench.kernels import ACTIVATIONS, ARCHITECTURES, compile_task, tasks
from fewbit.runtime.backends.cuda.codegen import NUMBERS, compiler, cuda_header, function_of, kernel_source
from fewbit.runtime.backends.cuda.codegen.compiler import Usage, compile_source, cubin, read_usage
from fewbit.tables import FewbitError, Table
from host_kernels import needs_nvrtc
from runtime_cases import table_of_bits, table_with

GELU = fewbit.load_table("gelu")


def sample():
    """Each function, and bits, dtype, kind and architecture several times over, in 30 of the thousands."""
    dtypes = [*NUMBERS]
    for i, activation in enumerate(ACTIVATIONS):
        bits = i % 8 + 1
        table = table_of_bits(bits, ("shared", "interval")[i // 2 % 2])
        table = Table(activation, table.kind, table.weight, table.boundaries, table.codes, table.levels, 1.0)
        yield table, dtypes[i % 4], ARCHITECTURES[i % 3]
    for bits, dtype in zip((1, 2, 3, 4), ("bfloat16", "float32") * 2, strict=True):
        yield fewbit.load_table("gelu", bits=bits), dtype, "sm_90"
    yield table_with([i / 7 for i in range(10_000)]), "bfloat16", "sm_90"  # the largest search


@pytest.mark.sample(7)
@needs_nvrtc
@pytest.mark.parametrize(
    ("table", "dtype", "arch"), [pytest.param(*c, id=f"{c[0].activation}-{c[0].bits}-{c[1]}-{c[2]}") for c in sample()]
)
def test_kernels_compile_and_do_not_spill(table, dtype, arch):
    (task,) = tasks([table], [dtype], [arch])
    compiled = compile_task(task)
    assert {usage.kernel for usage in compiled.usages} == {"forward", "encode", "multiply"}
    assert compiled.spilled == 0
    # 64 leave room for four blocks on a multiprocessor; 80 or 128 are taken by a few functions, of doubles above all.
    assert max(usage.registers for usage in compiled.usages) <= (80 if dtype != "float64" else 160)


@needs_nvrtc
def test_a_wrong_architecture_is_told():
    with pytest.raises(FewbitError, match=r"^NVRTC \d+\.\d+ cannot compile for sm_12345: "):
        compile_source(kernel_source(GELU, "float32"), "sm_12345")


class TestCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
        return tmp_path / "kernels"

    @pytest.fixture
    def compiled(self, monkeypatch):
        """Sources that were compiled; the compiler is a stand-in."""
        sources = []
        monkeypatch.setattr(compiler, "compile_source", lambda *key: (sources.append(key), (b"code", []))[1])
        monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0")
        return sources

    def test_what_was_compiled_is_not_compiled_again(self, compiled):
        assert cubin("a", "sm_90") == cubin("a", "sm_90") == b"code"
        assert compiled == [("a", "sm_90")]

    def test_source_architecture_and_compiler_make_the_key(self, compiled, monkeypatch):
        for _ in range(2):
            cubin("a", "sm_90")
            cubin("b", "sm_90")
            cubin("a", "sm_80")
            with monkeypatch.context() as later:
                later.setattr(compiler, "compiler_version", lambda: "13.1")
                cubin("a", "sm_90")
        assert len(compiled) == 4

    @pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:20], lambda c: b"", lambda c: c + b"x"])
    def test_a_damaged_entry_is_made_again(self, compiled, folder, damage):
        cubin("a", "sm_90")
        (entry,) = folder.iterdir()
        whole = entry.read_bytes()
        entry.write_bytes(damage(whole))
        assert cubin("a", "sm_90") == b"code"
        assert entry.read_bytes() == whole
        assert len(compiled) == 2

    def test_a_folder_that_cannot_be_is_done_without(self, compiled, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "file"))
        assert cubin("a", "sm_90") == cubin("a", "sm_90") == b"code"
        assert len(compiled) == 2

    @needs_nvrtc
    def test_real_code(self):
        source = kernel_source(GELU, "bfloat16", ["forward"], "gelu")
        assert cubin(source, "sm_90") == cubin(source, "sm_90")
        assert cubin(source, "sm_90").startswith(b"\x7fELF")


def test_the_assembler_s_log_is_read():
    log = """ptxas info    : 343 bytes gmem
ptxas info    : Compiling entry function 'multiply' for 'sm_90'
ptxas info    : Function properties for multiply
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 3104 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'encode' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""
    assert read_usage(log) == [Usage("multiply", 80, 12, 16, 3104), Usage("encode", 32, 0, 0, 0)]


def test_without_nvrtc_its_package_is_named(monkeypatch):
    monkeypatch.setattr(compiler, "import_module", lambda name: importlib.import_module(name + "_absent"))
    compiler.compiler_version.cache_clear()
    with pytest.raises(FewbitError, match=r"^no CUDA compiler: .* pip install 'cuda-core\[cu13\]'$"):
        compile_source("", "sm_90")
    compiler.compiler_version.cache_clear()


HEADER_USE = """
#include "a.cuh"
#include "b.cuh"
#include "a.cuh"

void run(const float* x, float* y, unsigned char* packed, long long n)
{
    namespace a = fewbit_gelu_shared_8;
    a::forward<float><<<fewbit::blocks<float>(n), fewbit::threads>>>(x, y, packed, n);
    a::encode<float><<<fewbit::blocks<float>(n), fewbit::threads>>>(x, packed, n);
    a::backward<float><<<fewbit::blocks<float>(n), fewbit::threads>>>(x, packed, y, n);
}

void run(const fewbit::bfloat16* x, fewbit::bfloat16* y, unsigned char* packed, long long n)
{
    namespace b = fewbit_x_arctan_x_interval_2;
    b::encode<fewbit::bfloat16><<<fewbit::blocks<fewbit::bfloat16>(n), fewbit::threads>>>(x, packed, n);
    b::backward<fewbit::bfloat16><<<fewbit::blocks<fewbit::bfloat16>(n), fewbit::threads>>>(x, packed, y, n);
}

struct Mine {
    static constexpr bool writes = true;
    static __device__ double of(double x) { return x * x; }
};

void run(const double* x, double* y, unsigned char* packed, long long n)
{
    fewbit_x_arctan_x_interval_2::forward<double, Mine><<<1, fewbit::threads>>>(x, y, packed, n);
}
"""


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_nvcc_compiles_the_header_on_its_own(tmp_path):
    """Two tables together, one of them without a function of its own, included twice."""
    expression = Table("x*arctan(x)", "interval", "uniform:-10,10", [0.0], [0, 1], [-1.0, 1.0], 1.0)
    for name, table in (("a.cuh", GELU), ("b.cuh", expression)):
        (tmp_path / name).write_text(cuda_header(table, *function_of(table.activation)), encoding="ascii")
    (tmp_path / "use.cu").write_text(HEADER_USE)
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-c", "use.cu", "-o", "use.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


@needs_nvrtc
def test_nvrtc_compiles_the_header_on_its_own():
    kernel = "template __global__ void fewbit_gelu_shared_8::forward<fewbit::half>" + (
        "(const fewbit::half*, fewbit::half*, unsigned char*, long long);"
    )
    code, usages = compile_source(cuda_header(GELU, "gelu") + kernel, "sm_80")
    assert code and sum(usage.spilled + usage.stack for usage in usages) == 0
