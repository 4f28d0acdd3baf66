"""What only the CUDA kernels of activations have: ways to search boundaries, alignment, numbers of blocks.

What they share with other backends is in ../test_activation.py.
"""

import numpy as np
import pytest
import torch
from fewbit.fewbit_gen import solve
from fewbit.runtime.backends.cuda.codegen import elements_per_block
from fewbit.runtime.backends.cuda.codegen.lookup import SUM_LIMIT, choose_search, find_cells
from fewbit.runtime.backends.reference import activation as reference
from host_kernels import COMPILER, HostKernels, at_offset
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from runtime_cases import DTYPES, around, assert_same_bits, key_of, normal, table_with
from strategies import tables

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")
ARITHMETIC = {dtype: "double" if dtype == torch.float64 else "float" for dtype in DTYPES}


def assert_like_the_reference(kernels, table, x, blocks=1, offset=0):
    """encode of x, and multiply of x reversed by its codes."""
    key = key_of(table)
    packed = reference.encode(x, key)
    assert torch.equal(kernels.encode(at_offset(x, offset), blocks), packed)
    grad = x.flip(0)
    product = kernels.multiply(at_offset(grad, offset), packed, blocks, offset)
    assert_same_bits(product, reference.multiply(grad, packed, key))


@pytest.mark.sample(1)
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


def test_cells_serve_solved_tables():
    """What the speed rests on: 3, 4 and 8 bits are looked up alike, and 8 bits fit into shared memory."""
    for name in ("gelu", "silu", "tanh", "selu"):
        for bits in (3, 4, 8):
            assert choose_search(solve(name, bits, certify=False), "float") == "cells"


@pytest.mark.parametrize("count", [3, 200])
def test_boundaries_beyond_the_floats_are_searched(count):
    boundaries = np.unique([-1e308, -3.5e38, *np.linspace(-3, 3, count), 3.5e38, 1e308])
    assert choose_search(table_with(boundaries), "float") == "bisect"
