"""Entropy of codes, and what a real compressor makes of them."""

import sys

import pytest
import torch
from fewbit import FewbitError
from fewbit.quantizers import Outlier, PerGroup
from fewbit.runtime.quantizers.entropy import compressors, measure, total


def relu_codes(n=1 << 16):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).relu()
    return Outlier(3, 0.02, relu=True).compress(x)


def test_of_one_code_the_entropy_is_nothing():
    codes = measure(Outlier(3, 0).compress(torch.zeros(8000)))
    assert (codes.elements, codes.packed) == (8000, 3000)
    assert codes.entropy == 0
    assert codes.compressed < 100


def test_uniform_codes_cannot_be_compressed():
    x = torch.randint(0, 16, (1 << 16,), generator=torch.Generator().manual_seed(0)).float()
    codes = measure(Outlier(4, 0).compress(x))
    assert codes.entropy == pytest.approx(codes.packed, rel=1e-3)
    assert codes.compressed >= codes.packed * 0.999
    assert codes.off <= 0.001


def test_entropy_is_shannons():
    x = torch.tensor([0.0] * 600 + [1.0] * 200)
    codes = measure(Outlier(1, 0).compress(x))
    bits = -(0.75 * torch.log2(torch.tensor(0.75)) + 0.25 * torch.log2(torch.tensor(0.25)))
    assert codes.entropy == pytest.approx(float(bits) * 800 / 8)


def test_measures_are_the_same_whatever_torch_s_defaults():
    codes = relu_codes()
    expected = measure(codes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert measure(codes) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", compressors())
def test_relu_codes_get_smaller(name):
    codes = measure(relu_codes(), name)
    assert codes.compressor == name
    assert 0 < codes.entropy_off < 1
    if name != "lz4":  # it has no entropy coder
        assert codes.off > 0.1


def test_other_quantizers_and_sums():
    parts = [measure(relu_codes(), "zlib"), measure(PerGroup(bits=2).compress(torch.randn(40, 100)), "zlib")]
    both = total(parts)
    assert both.packed == sum(part.packed for part in parts)
    assert both.compressed == sum(part.compressed for part in parts)


def test_nothing_is_no_error():
    codes = measure(Outlier(3, 0.02).compress(torch.empty(0)))
    assert (codes.elements, codes.packed, codes.entropy, codes.compressed, codes.off) == (0, 0, 0, 0, 0)


def test_without_packages_there_is_zlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    assert list(compressors()) == ["zlib"]
    assert measure(relu_codes()).compressor == "zlib"


def test_an_unknown_compressor_is_told():
    with pytest.raises(FewbitError, match=r"no compressor 'rar'; installed are .*zlib"):
        measure(relu_codes(), "rar")
    with pytest.raises(FewbitError, match="no tensor"):
        total([])
