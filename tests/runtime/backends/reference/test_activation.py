"""The oracle is held against the specification: NumPy doubles and Python integers."""

import numpy as np
import pytest
import torch
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.tensors.packing import pack, unpack
from hypothesis import given
from runtime_cases import (
    DTYPES,
    HALVES,
    LAYOUTS,
    all_halves,
    around,
    assert_same_bits,
    key_of,
    laid_out,
    table_of_bits,
    table_with,
)
from strategies import tables


@pytest.mark.parametrize("dtype", DTYPES)
class TestCodes:
    @pytest.mark.sample(1)
    @given(table=tables())
    def test_are_those_of_the_table_in_float64(self, dtype, table):
        x = around(table.boundaries, dtype)
        codes = unpack(reference.encode(x, key_of(table)), table.bits, x.numel())
        assert codes.tolist() == table.encode(x.double().numpy()).tolist()

    @pytest.mark.parametrize("bits", range(1, 9))
    @pytest.mark.parametrize("kind", ["interval", "shared"])
    def test_are_those_of_the_table_for_every_number_of_bits(self, dtype, kind, bits):
        table = table_of_bits(bits, kind)
        x = torch.randn(1001, generator=torch.Generator().manual_seed(bits), dtype=torch.float64).mul(4).to(dtype)
        codes = unpack(reference.encode(x, key_of(table)), bits, x.numel())
        assert codes.tolist() == table.encode(x.double().numpy()).tolist()

    def test_of_not_a_number_are_the_last_interval_s(self, dtype):
        table = table_of_bits(3, "interval")
        x = torch.full((8,), torch.nan, dtype=dtype)
        assert unpack(reference.encode(x, key_of(table)), 3, 8).tolist() == [7] * 8


def nearest_bfloat16(x):
    """Round float32 to bfloat16 by its definition: the nearer neighbour, the even one of two, ∞ past the last."""
    x = np.asarray(x, np.float32)
    word = x.view(np.uint32)
    truncated = (word & 0xFFFF0000).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(truncated), 2.0**-126))) - 7) * np.where(x < 0, -1, 1)
    excess = np.abs(x.astype(np.float64) - truncated) / np.abs(step)
    odd = (word >> 16) & 1 == 1
    up = (excess > 0.5) | ((excess == 0.5) & odd)
    result = truncated + np.where(up, step, 0)
    return np.where(np.abs(result) >= 2.0**128, np.copysign(np.inf, x), np.copysign(result, x))


def times_every_level(grad):
    """Every gradient times every level of a 256-level table, and those levels."""
    table = table_with(np.arange(255.0))
    codes = torch.arange(256, dtype=torch.uint8)
    grad = grad[:, None].expand(-1, 256).contiguous()
    return reference.multiply(grad, pack(codes.expand(grad.shape), 8), key_of(table)), table.levels


def products(grad, levels):
    """Every gradient times every level, in the dtype of the gradients; a level of 0 selects 0."""
    with np.errstate(all="ignore"):
        exact = grad[:, None] * levels.astype(grad.dtype)
    return np.where(levels == 0, grad.dtype.type(0), exact)


class TestProducts:
    def test_of_float16_are_the_float32_product_rounded_once(self):
        grad = all_halves(torch.float16)[::17]
        result, levels = times_every_level(grad)
        with np.errstate(all="ignore"):
            exact = products(grad.float().numpy(), levels).astype(np.float16)
        assert_same_bits(result, torch.from_numpy(exact))

    def test_of_bfloat16_are_the_float32_product_rounded_once(self):
        grad = all_halves(torch.bfloat16)[::17]
        grad = grad[grad.isfinite()]
        result, levels = times_every_level(grad)
        exact = products(grad.float().numpy(), levels)
        finite = np.isfinite(exact)
        rounded = nearest_bfloat16(exact[finite])
        assert result.double().numpy()[finite].tolist() == rounded.tolist()
        assert (np.signbit(result.double().numpy()[finite]) == np.signbit(rounded)).all()
        assert np.isinf(rounded).any(), "no product overflowed: the test has lost its edge"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_wide_types_are_numpy_s_in_the_same_type(self, dtype):
        grad = around(np.random.default_rng(0).normal(0, 1e3, 100), dtype)
        result, levels = times_every_level(grad)
        assert_same_bits(result, torch.from_numpy(products(grad.numpy(), levels)))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name][0] > 30])
def test_the_product_lies_like_the_gradient(layout):
    grad = laid_out(layout, torch.float32).clone()
    table = table_of_bits(2)
    result = reference.multiply(grad, reference.encode(grad, key_of(table)), key_of(table))
    assert result.stride() == grad.stride()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_inference_mode_prepared_serves_training(dtype):
    table = table_of_bits(3, seed=7)
    x = torch.ones(9, dtype=dtype)
    with torch.inference_mode():
        first = reference.encode(x, key_of(table)).tolist()
    assert reference.encode(x.clone(), key_of(table)).tolist() == first
