"""The CUDA kernels' own source, run on the CPU, gives the bytes of the reference."""

import numpy as np
import pytest
import torch
from fewbit.fewbit_gen import solve
from fewbit.runtime.backends.cuda.codegen import THREADS, elements_per_block
from fewbit.runtime.backends.cuda.codegen.lookup import SUM_LIMIT, choose_search, find_cells
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.tensors.packing import pack
from host_kernels import COMPILER, HostKernels, at_offset
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from runtime_cases import DTYPES, HALVES, all_halves, around, assert_same_bits, key_of, table_of_bits, table_with
from strategies import tables

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")
ARITHMETIC = {dtype: "double" if dtype == torch.float64 else "float" for dtype in DTYPES}


def normal(n, dtype, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(4).to(dtype)


def assert_like_the_reference(kernels, table, x, blocks=1, offset=0):
    """encode of x, and multiply of x reversed by its codes."""
    key = key_of(table)
    packed = reference.encode(x, key)
    assert torch.equal(kernels.encode(at_offset(x, offset), blocks), packed)
    grad = x.flip(0)
    product = kernels.multiply(at_offset(grad, offset), packed, blocks, offset)
    assert_same_bits(product, reference.multiply(grad, packed, key))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # each is built: no time to shrink
@given(data=st.data())
def test_any_table_number_size_and_alignment(dtype, data):
    table = data.draw(tables())
    kernels = HostKernels(table, dtype)
    x = around(table.boundaries, dtype)
    drawn = torch.tensor(data.draw(st.lists(st.floats(), max_size=20)), dtype=torch.float64).to(dtype)
    assert_like_the_reference(kernels, table, torch.cat([x, drawn]))
    most = 3 * elements_per_block(dtype.itemsize)
    for _ in range(6):
        n, offset, blocks = data.draw(st.tuples(st.integers(0, most), st.integers(0, 16), st.integers(1, 4)))
        assert_like_the_reference(kernels, table, normal(n, dtype, n), blocks, offset)


# Each is built, so not all combinations: a number of bits with two dtypes, a dtype with both kinds.
@pytest.mark.parametrize(("bits", "dtype"), [(bits, DTYPES[(bits + i) % 4]) for bits in range(1, 9) for i in (0, 1)])
def test_every_number_of_bits_and_size_about_groups_and_tiles(bits, dtype):
    table = table_of_bits(bits, ("interval", "shared")[bits // 2 % 2])
    kernels = HostKernels(table, dtype)
    assert_like_the_reference(kernels, table, around(table.boundaries, dtype))
    tile, block = elements_per_block(dtype.itemsize) // (THREADS // 32), elements_per_block(dtype.itemsize)
    for n in (0, 1, 7, 8, 9, tile - 1, tile, tile + 1, 2 * tile + 17, block - 8, block, block + 1, 2 * block + 5):
        assert_like_the_reference(kernels, table, normal(n, dtype, n))
    assert_like_the_reference(kernels, table, normal(2 * block + 5, dtype), blocks=2)
    assert_like_the_reference(kernels, table, normal(2 * block + 5, dtype), blocks=2, offset=1)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(count, torch.float32) for count in (0, 1, SUM_LIMIT, SUM_LIMIT + 1, 16, 255, 511, 2000)]
    + [(count, torch.float64) for count in (1, 17, 2000)],
)
def test_every_number_of_boundaries_and_way_to_search(dtype, count):
    boundaries = np.linspace(-3, 5, count) if count != 1 else np.array([0.5])
    table = table_with(boundaries)
    ways = ["bisect", *(["cells"] if find_cells(table, ARITHMETIC[dtype]) else [])]
    ways += ["sum"] if count <= 255 else []
    x = around(boundaries, dtype)
    for way in ways:
        kernels = HostKernels(table, dtype, search=way)
        assert torch.equal(kernels.encode(x), reference.encode(x, key_of(table))), way


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_that_fall_together_when_rounded(dtype):
    boundaries = np.concatenate([[-7.0], 1 + np.arange(6) * 2.0**-52, 2 + np.arange(6) * 2.0**-30, [3.0]])
    table = table_with(boundaries)
    assert_like_the_reference(HostKernels(table, dtype), table, around(boundaries, dtype))


def test_cells_serve_solved_tables():
    """What the speed rests on: 3, 4 and 8 bits are looked up alike, and 8 bits fit into shared memory."""
    for name in ("gelu", "silu", "tanh", "selu"):
        for bits in (3, 4, 8):
            assert choose_search(solve(name, bits, certify=False), "float") == "cells"


@pytest.mark.parametrize("count", [3, 200])
def test_boundaries_beyond_the_floats_are_searched(count):
    boundaries = np.unique([-1e308, -3.5e38, *np.linspace(-3, 3, count), 3.5e38, 1e308])
    table = table_with(boundaries)
    assert choose_search(table, "float") == "bisect"
    for dtype in (torch.float32, torch.float16):
        assert_like_the_reference(HostKernels(table, dtype), table, around(boundaries, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_there_is(dtype):
    table = table_of_bits(3)
    assert_like_the_reference(HostKernels(table, dtype), table, all_halves(dtype), blocks=3)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.bfloat16), (5, torch.float64), (7, torch.float32)])
def test_padding_bits_are_zero(bits, dtype):
    """All codes are the highest, so any bit that leaks past the last code would show."""
    kernels = HostKernels(table_of_bits(bits, "interval"), dtype)
    for n in (1, 2, 5, 7, 8, 300):
        packed = kernels.encode(torch.full((n,), torch.inf, dtype=dtype))
        assert int.from_bytes(bytes(packed.tolist()), "little") == (1 << (n * bits)) - 1


def test_a_level_of_zero_selects_zero():
    levels = [0.0, 1.0, -0.0, 1e-300, 2.0]
    grad = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, -1.0] * 5)
    table = type(table_of_bits(3))("f", "shared", "uniform:0,1", [], [0], levels, 1.0)
    packed = pack(torch.arange(5, dtype=torch.uint8).repeat_interleave(5), 3)
    for dtype in DTYPES:
        expected = reference.multiply(grad.to(dtype), packed, key_of(table))
        assert_same_bits(HostKernels(table, dtype).multiply(grad.to(dtype), packed), expected)
