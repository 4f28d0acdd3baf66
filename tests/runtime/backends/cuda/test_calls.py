"""How the CUDA backend calls its kernels, without a GPU: the kernels run on the CPU, launches are recorded."""

import sys

import pytest
import torch
from backends import launched_on_host
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from fewbit.runtime.backends.cuda import activation as cuda
from fewbit.runtime.backends.cuda import keys
from fewbit.runtime.backends.cuda.codegen import FORMULAS
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.backends.reference import keys as reference_keys
from host_kernels import COMPILER, HostKernels, needs_gxx
from quantizer_cases import generator, same_bits
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
    monkeypatch.setattr(cuda, "available", lambda device: True)
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


VECTORS = {"scale": torch.ones(640), "shift": torch.zeros(640)}


@needs_gxx
@pytest.mark.parametrize(
    ("quantizer", "given", "draws"),
    [
        (PerGroup(4), {}, True),
        (PerGroup(3, levels="fitted"), {}, True),
        (Rotated(3), {}, True),
        (Outlier(3, 0.02), {}, False),
        (FixedPoint(4), VECTORS, False),
    ],
    ids=str,
)
def test_quantizers_call_kernels_without_ops(monkeypatch, quantizer, given, draws):
    """With seeds beside the tensor, from the stream or a generator; the same codes as on the CPU."""
    x = torch.randn(9, 640, generator=generator()).bfloat16()
    module = sys.modules[type(quantizer).__module__]
    sources = (dict, lambda: {"generator": generator(3)})[: 1 + draws]
    torch.manual_seed(5)
    expected = [quantizer.compress(x, **given, **source()) for source in sources]
    launched = launched_on_host(monkeypatch)
    monkeypatch.setattr(module, "kernels_of", lambda x, cpu, cuda, *_: cuda)
    monkeypatch.setattr(module, "ops", None)
    monkeypatch.setattr(keys, "draw", reference_keys.draw)
    torch.manual_seed(5)
    for plain, source in zip(expected, sources, strict=True):
        ours = quantizer.compress(x, **given, **source())
        assert same_bits(ours.packed, plain.packed)
        assert same_bits(ours.decompress(), plain.decompress())
    assert {"quantize", "dequantize"} <= {*launched}
