"""How the CUDA backend calls its kernels, without a GPU: the kernels run on the CPU, launches are recorded."""

import warnings

import pytest
import torch
from fewbit.runtime.backends.cuda import activation as cuda
from fewbit.runtime.backends.cuda.codegen import FORMULAS
from fewbit.runtime.backends.reference import activation as reference
from host_kernels import COMPILER, HostKernels
from runtime_cases import DENSE, LAYOUTS, assert_same_bits, key_of, laid_out, table_of_bits

TABLE = table_of_bits(3)
KEY = key_of(TABLE)


@pytest.fixture(scope="module")
def host():
    if COMPILER is None:
        pytest.skip("no g++ on this machine")
    return HostKernels(TABLE, torch.float32, "relu")


@pytest.fixture
def launches(host, monkeypatch):
    """Names of the kernels that were launched; they run on the CPU."""
    names = []

    class OnHost:
        bits = TABLE.bits

        def __init__(self, name):
            self.name = name

        def launch(self, x, *pointers):
            names.append(self.name)
            assert pointers[-1 if self.name != "multiply" else 1] % 16 == 0, "the packed code is not aligned"
            host.run(self.name, 2, *pointers, x.numel())

    monkeypatch.setattr(cuda, "_kernel", lambda name, *_: OnHost(name))
    monkeypatch.setattr(cuda, "available", lambda: True)
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_is_one_kernel_whatever_the_layout(launches, layout):
    x = laid_out(layout, torch.float32)
    y, packed = cuda.activation(x, "relu", [], KEY)
    expected_y, expected_packed = reference.activation(x, "relu", [], KEY)
    assert_same_bits(y, expected_y)
    assert y.stride() == expected_y.stride()
    assert torch.equal(packed, expected_packed)
    assert launches == ["forward"]


@pytest.mark.parametrize("layout", DENSE)
def test_encode_and_multiply(launches, layout):
    x = laid_out(layout, torch.float32)
    packed = cuda.encode(x, KEY)
    assert torch.equal(packed, reference.encode(x, KEY))
    product, expected = (backend.multiply(x, packed, KEY) for backend in (cuda, reference))
    assert_same_bits(product, expected)
    assert product.stride() == expected.stride()
    assert launches == ["encode", "multiply"]


def test_a_function_without_a_formula_is_torch_s_own(launches, monkeypatch):
    monkeypatch.delitem(FORMULAS, "tanh")
    x = laid_out("permuted", torch.float32)
    y, packed = cuda.activation(x, "tanh", [], KEY)
    assert_same_bits(y, torch.tanh(x))
    assert torch.equal(packed, reference.encode(x, KEY))
    assert launches == ["encode"]


def test_a_packed_code_that_is_a_view_is_taken(launches):
    x = laid_out("odd", torch.float32)
    packed = reference.encode(x, KEY)
    view = torch.cat([torch.zeros(5, dtype=torch.uint8), packed])[5:]
    assert_same_bits(cuda.multiply(x, view, KEY), reference.multiply(x, packed, KEY))
    spread = torch.stack([packed, packed], dim=1)[:, 0]
    assert_same_bits(cuda.multiply(x, spread, KEY), reference.multiply(x, packed, KEY))


@pytest.mark.parametrize("packed", [torch.zeros(11, dtype=torch.uint8), torch.zeros(12, dtype=torch.int8)])
def test_a_packed_code_of_another_size_is_refused(launches, packed):
    with pytest.raises(RuntimeError, match=r"^30 codes of 3 bits take 12 bytes on cpu, not "):
        cuda.multiply(torch.zeros(30), packed, KEY)
    assert launches == []


class Core:
    """A stand-in for cuda.core."""

    class Stream:
        from_handle = staticmethod(lambda handle: f"stream {handle}")

    @staticmethod
    def LaunchConfig(grid, block):
        return grid, block

    def __init__(self):
        self.launched = []

    def launch(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture
def core(monkeypatch):
    core = Core()
    monkeypatch.setattr(cuda, "core", lambda: core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    streams = {0: 0, 1: 77}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    for cached in (cuda._config, cuda._stream):
        cached.cache_clear()
    yield core
    for cached in (cuda._config, cuda._stream):
        cached.cache_clear()


class TestLaunch:
    def test_as_many_blocks_as_there_is_work_up_to_what_fills_the_device(self, core):
        kernel = cuda._Loaded("encode", 3, 0, 100, "kernel")
        for n, blocks in ((1, 1), (4096, 1), (4097, 2), (10**6, 100)):
            kernel.launch(torch.zeros(n), 11, 22)
            assert core.launched.pop() == ("stream 0", (blocks, 256), "kernel", 11, 22, n)

    def test_nothing_is_launched_for_nothing(self, core):
        cuda._Loaded("encode", 3, 0, 100, "kernel").launch(torch.zeros(0), 11, 22)
        assert core.launched == []

    def test_the_current_stream_of_the_tensor_s_device(self, core, monkeypatch):
        entered = []

        class Device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                entered.append(self.index)

            def __exit__(self, *_):
                pass

        monkeypatch.setattr(torch.cuda, "device", Device)
        cuda._Loaded("encode", 3, 1, 100, "kernel").launch(torch.zeros(1), 11, 22)
        assert core.launched[0][0] == "stream 77"
        assert entered == [1]

    def test_an_error_is_raised_with_its_cause(self, core, monkeypatch):
        def fails(*_):
            raise OSError("CUDA_ERROR_INVALID_HANDLE")

        monkeypatch.setattr(core, "launch", fails)
        with pytest.raises(RuntimeError, match="'encode' was not launched: CUDA_ERROR_INVALID_HANDLE") as caught:
            cuda._Loaded("encode", 3, 0, 100, "kernel").launch(torch.zeros(1), 11, 22)
        assert isinstance(caught.value.__cause__, OSError)


def test_without_cuda_core_the_reference_works_and_one_warning_names_the_package(monkeypatch):
    monkeypatch.setattr(cuda, "has_compiler", lambda: False)
    cuda.available.cache_clear()
    x = laid_out("odd", torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y, packed = cuda.activation(x, "gelu", [], KEY)
        assert torch.equal(cuda.encode(x, KEY), packed)
        product = cuda.multiply(x, packed, KEY)
    cuda.available.cache_clear()
    assert_same_bits(y, torch.nn.functional.gelu(x))
    assert_same_bits(product, reference.multiply(x, packed, KEY))
    assert [str(warning.message) for warning in caught] == [
        "fewbit runs on this GPU in plain torch, slowly: cuda-core is not installed; pip install 'cuda-core[cu13]'"
    ]
