"""How kernels are launched, without a GPU: a stand-in for cuda.core records it."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from driver_double import in_place_of_the_driver
from fewbit import FewbitError
from fewbit.runtime.backends.cuda import activation, launching
from fewbit.runtime.backends.cuda.codegen import compiler
from fewbit.runtime.backends.cuda.launching import Loaded
from fewbit.runtime.backends.reference import activation as reference
from runtime_cases import assert_same_bits, key_of, laid_out, table_of_bits

KEY = key_of(table_of_bits(3))


@pytest.fixture
def core(monkeypatch):
    return in_place_of_the_driver(monkeypatch)


class TestLaunch:
    def test_as_many_blocks_as_there_is_work_up_to_what_fills_the_device(self, core):
        kernel = activation._OfTable(3, Loaded("encode", 0, 100, "kernel"))
        for n, blocks in ((1, 1), (4096, 1), (4097, 2), (10**6, 100)):
            kernel.launch(torch.zeros(n), 11, 22)
            launch = core.launches.pop()
            assert (launch.stream, launch.blocks, launch.arguments) == ("stream 0", blocks, (11, 22, n))

    def test_nothing_is_launched_for_nothing(self, core):
        activation._OfTable(3, Loaded("encode", 0, 100, "kernel")).launch(torch.zeros(0), 11, 22)
        assert core.launches == []

    def test_the_current_stream_and_the_context_of_the_kernel_s_device(self, core):
        for device, stream in ((1, "stream 77"), (0, "stream 0"), (1, "stream 77")):
            Loaded("encode", device, 100, "kernel").launch(1)
            assert core.launches[-1].stream == stream
        assert [launch.context for launch in core.launches[:2]] == [1, 0]

    def test_each_thread_has_a_context_before_it_launches(self, core):
        """As autograd's backward thread, in which torch may not have called the runtime yet."""
        kernel = Loaded("encode", 0, 100, "kernel")
        kernel.launch(1)
        for _ in range(2):
            thread = threading.Thread(target=kernel.launch, args=(1,))
            thread.start()
            thread.join()
        assert [launch.context for launch in core.launches] == [0, 0, 0]

    def test_an_error_is_raised_with_its_cause(self, core, monkeypatch):
        def fails(*_):
            raise OSError("CUDA_ERROR_INVALID_HANDLE")

        monkeypatch.setattr(core, "launch", fails)
        with pytest.raises(RuntimeError, match="'encode' was not launched: CUDA_ERROR_INVALID_HANDLE") as caught:
            Loaded("encode", 0, 100, "kernel").launch(1)
        assert isinstance(caught.value.__cause__, OSError)

    def test_a_kernel_is_not_loaded_while_a_graph_is_captured(self, core):
        core.capturing = True
        for first_use in (lambda: launching.loaded("source", "encode", 0), lambda: launching.available(0)):
            with pytest.raises(FewbitError, match="is first used while a CUDA graph is captured: warm up first"):
                first_use()
        core.capturing = False
        loaded = launching.loaded("source", "encode", 0)
        assert loaded.kernel == ("source", "encode") and loaded.most_blocks == 132 * 5
        assert launching.available(0)


def test_code_is_loaded_where_torch_s_cache_holds_the_memory(core, monkeypatch):
    """As at a first step's peak; what fails for good is told in one line."""
    free, load = [], core.ObjectCode.from_cubin

    def takes_memory(code):
        if not free:
            raise OSError("CUDA_ERROR_OUT_OF_MEMORY")
        return load(code)

    core.ObjectCode.from_cubin = takes_memory
    with pytest.raises(RuntimeError, match=r"kernel 'encode' was not loaded: CUDA_ERROR_OUT_OF_MEMORY$"):
        launching.loaded("source", "encode", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(True))
    assert launching.loaded("source", "encode", 0).kernel == ("source", "encode")


def no_compiler(*_):
    raise FewbitError("no CUDA compiler")


def wrong_driver(*_):
    raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION:\n the driver is older")


@pytest.mark.parametrize(
    ("where", "fails", "why"),
    [
        ("has_compiler", lambda: False, "cuda-core is not installed; pip install 'cuda-core[cu13]'"),
        ("machine_code", no_compiler, "no CUDA compiler"),
        (
            "driver.load",
            wrong_driver,
            "fewbit's CUDA kernel 'trial' was not loaded: CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the driver is older",
        ),
        (
            "driver.launch",
            wrong_driver,
            "fewbit's CUDA kernel 'trial' was not launched: CUDA_ERROR_UNSUPPORTED_PTX_VERS",
        ),
    ],
)
def test_where_no_kernel_runs_the_reference_works_and_one_warning_says_why(core, monkeypatch, where, fails, why):
    if where == "driver.load":
        core.ObjectCode = SimpleNamespace(from_cubin=fails)
    elif where == "driver.launch":
        monkeypatch.setattr(core, "launch", fails)
    else:
        monkeypatch.setattr(launching, where, fails)
    x = laid_out("odd", torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y, packed = activation.activation(x, "gelu", [], KEY)
        assert torch.equal(activation.encode(x, KEY), packed)
        product = activation.multiply(x, packed, KEY)
    assert_same_bits(y, torch.nn.functional.gelu(x))
    assert_same_bits(product, reference.multiply(x, packed, KEY))
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"fewbit runs on this GPU in plain torch, slowly: {why}")


def test_an_architecture_newer_than_the_compiler_gets_ptx(monkeypatch, tmp_path):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80, 90, 100))
    monkeypatch.setattr(compiler, "compiler_version", lambda: "12.8")
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: (f"cubin {arch}".encode(), []))
    monkeypatch.setattr(compiler, "_compile_ptx", lambda source, arch: f"ptx {arch}".encode())
    for arch, code in (("sm_90", "cubin sm_90"), ("sm_103", "ptx compute_100"), ("sm_89", "ptx compute_80")):
        assert compiler.machine_code("source", arch) == (code.split()[0], code.encode())
