"""How kernels are launched, without a GPU: a stand-in for cuda.core records it."""

import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.backends.cuda import activation, launching
from fewbit.runtime.backends.cuda.codegen import compiler
from fewbit.runtime.backends.cuda.launching import Loaded
from fewbit.runtime.backends.reference import activation as reference
from runtime_cases import assert_same_bits, key_of, laid_out, table_of_bits

KEY = key_of(table_of_bits(3))


class Kernel(tuple):
    """What a stand-in for cuda.core loads: five blocks of it fit on a multiprocessor."""

    occupancy = SimpleNamespace(max_active_blocks_per_multiprocessor=lambda threads, shared: 1280 // threads)


class Core:
    """A stand-in for cuda.core that records launches, and the device whose context each thread had."""

    Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
    LaunchConfig = staticmethod(lambda grid, block: (grid, block))

    def __init__(self):
        self.launched, self.context, self.contexts = [], threading.local(), []
        self.ObjectCode = SimpleNamespace(from_cubin=self.load, from_ptx=self.load)

    def load(self, code):
        return SimpleNamespace(get_kernel=lambda name: Kernel((code, name)))

    def launch(self, *arguments):
        self.launched.append(arguments)
        self.contexts.append(getattr(self.context, "device", None))

    def Device(self, index):
        return SimpleNamespace(set_current=lambda: setattr(self.context, "device", index))


@pytest.fixture
def core(monkeypatch):
    core = Core()
    core.device = 0
    streams = {-1: 0, 0: 0, 1: 77}

    @contextmanager
    def device(index):
        before, core.device = core.device, index
        yield
        core.device = before

    monkeypatch.setattr(launching, "core", lambda: core)
    monkeypatch.setattr(launching, "_thread", launching._Thread())
    monkeypatch.setattr(launching, "machine_code", lambda source, arch: ("cubin", f"{arch} {source}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: core.device)
    monkeypatch.setattr(torch.cuda, "device", device)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    caches = (launching._config, launching._stream, launching.available)
    for cached in caches:
        cached.cache_clear()
    yield core
    for cached in caches:
        cached.cache_clear()


class TestLaunch:
    def test_as_many_blocks_as_there_is_work_up_to_what_fills_the_device(self, core):
        kernel = activation._OfTable(3, Loaded("encode", 0, 100, "kernel"))
        for n, blocks in ((1, 1), (4096, 1), (4097, 2), (10**6, 100)):
            kernel.launch(torch.zeros(n), 11, 22)
            assert core.launched.pop() == ("stream 0", (blocks, 256), "kernel", 11, 22, n)

    def test_nothing_is_launched_for_nothing(self, core):
        activation._OfTable(3, Loaded("encode", 0, 100, "kernel")).launch(torch.zeros(0), 11, 22)
        assert core.launched == []

    def test_the_current_stream_and_the_context_of_the_kernel_s_device(self, core):
        for device, stream in ((1, "stream 77"), (0, "stream 0"), (1, "stream 77")):
            Loaded("encode", device, 100, "kernel").launch(1)
            assert core.launched[-1][0] == stream
        assert core.contexts[:2] == [1, 0]

    def test_each_thread_has_a_context_before_it_launches(self, core):
        """As autograd's backward thread, in which torch may not have called the runtime yet."""
        kernel = Loaded("encode", 0, 100, "kernel")
        kernel.launch(1)
        for _ in range(2):
            thread = threading.Thread(target=kernel.launch, args=(1,))
            thread.start()
            thread.join()
        assert core.contexts == [0, 0, 0]

    def test_an_error_is_raised_with_its_cause(self, core, monkeypatch):
        def fails(*_):
            raise OSError("CUDA_ERROR_INVALID_HANDLE")

        monkeypatch.setattr(core, "launch", fails)
        with pytest.raises(RuntimeError, match="'encode' was not launched: CUDA_ERROR_INVALID_HANDLE") as caught:
            Loaded("encode", 0, 100, "kernel").launch(1)
        assert isinstance(caught.value.__cause__, OSError)

    def test_a_kernel_is_not_loaded_while_a_graph_is_captured(self, core, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for first_use in (lambda: launching.loaded("source", "encode", 0), lambda: launching.available(0)):
            with pytest.raises(FewbitError, match="is first used while a CUDA graph is captured: warm up first"):
                first_use()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        loaded = launching.loaded("source", "encode", 0)
        assert loaded.kernel == ("sm_90 source", "encode") and loaded.most_blocks == 132 * 5
        assert launching.available(0)


def no_compiler(*_):
    raise FewbitError("no CUDA compiler")


def wrong_driver(*_):
    raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION:\n the driver is older")


@pytest.mark.parametrize(
    ("where", "fails", "why"),
    [
        ("has_compiler", lambda: False, "cuda-core is not installed; pip install 'cuda-core[cu13]'"),
        ("machine_code", no_compiler, "no CUDA compiler"),
        ("Core.load", wrong_driver, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the driver is older"),
        ("Core.launch", wrong_driver, "fewbit's CUDA kernel 'trial' was not launched: CUDA_ERROR_UNSUPPORTED_PTX_VERS"),
    ],
)
def test_where_no_kernel_runs_the_reference_works_and_one_warning_says_why(core, monkeypatch, where, fails, why):
    if where == "Core.load":
        core.ObjectCode = SimpleNamespace(from_cubin=fails)
    elif where == "Core.launch":
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
