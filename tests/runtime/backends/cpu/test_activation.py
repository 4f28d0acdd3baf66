"""The Numba backend gives the bytes of the reference, whatever the table, the numbers, the size and the threads."""

import sys

import numpy as np
import pytest
import torch
from fewbit.runtime.activations.user_functions import custom
from fewbit.runtime.backends.cpu import activation as cpu
from fewbit.runtime.backends.cpu import threads as team
from fewbit.runtime.backends.cpu.activation_kernels import BLOCK, LINEAR_LIMIT
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.tensors.packing import GROUP, pack, packed_size, unpack
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import (
    DTYPES,
    HALVES,
    all_halves,
    around,
    assert_same_bits,
    key_of,
    parameters_of,
    table_of_bits,
    table_with,
)
from strategies import tables

SIZES = [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5, 3 * BLOCK + 8]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def normal(n, dtype, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(4).to(dtype)


def assert_equal_backends(x, grad, table):
    """encode of x and multiply of grad by the codes of x."""
    key = key_of(table)
    packed = reference.encode(x, key)
    assert torch.equal(cpu.encode(x, key), packed)
    assert_same_bits(cpu.multiply(grad, packed, key), reference.multiply(grad, packed, key))


@pytest.mark.parametrize("dtype", DTYPES)
class TestAgainstTheReference:
    @given(data=st.data())
    def test_any_table_on_any_number(self, dtype, data):
        table = data.draw(tables())
        x = around(table.boundaries, dtype)
        drawn = data.draw(st.lists(st.floats(), max_size=20))
        x = torch.cat([x, torch.tensor(drawn, dtype=torch.float64).to(dtype)])
        assert_equal_backends(x, x.flip(0), table)

    @pytest.mark.parametrize("kind", ["interval", "shared"])
    @pytest.mark.parametrize("bits", range(1, 9))
    def test_every_number_of_bits_and_kind(self, dtype, bits, kind):
        table = table_of_bits(bits, kind)
        x = around(table.boundaries, dtype)
        assert_equal_backends(x, normal(x.numel(), dtype), table)

    @pytest.mark.parametrize(
        "count", [0, 1, 2, 3, LINEAR_LIMIT - 1, LINEAR_LIMIT, LINEAR_LIMIT + 1, 127, 128, 255, 256, 1000, 65_535]
    )
    def test_every_number_of_boundaries(self, dtype, count):
        """Sum and search: the search is padded to 2^p − 1, so counts around powers of 2 matter."""
        boundaries = np.unique(np.random.default_rng(count).normal(0, 4, count))
        x = around(boundaries[:: max(1, count // 500)], dtype)
        assert_equal_backends(x, normal(x.numel(), dtype), table_with(boundaries))

    @pytest.mark.parametrize("count", [4, 2 * LINEAR_LIMIT])
    def test_boundaries_that_fall_together_when_rounded(self, dtype, count):
        boundaries = 1 + np.arange(count) * 2.0**-52
        assert_equal_backends(around(boundaries, dtype), normal(3 * count + 14, dtype), table_with(boundaries))

    @pytest.mark.parametrize("repeat", [1, LINEAR_LIMIT])
    def test_boundaries_at_the_edges_of_the_range(self, dtype, repeat):
        limits = torch.finfo(dtype)
        tiny = float(
            torch.tensor([1], dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(dtype)
        )
        edges = [-sys.float_info.max, limits.min, -1e-310, -tiny, -tiny / 2, 0.0, tiny / 2, tiny, limits.tiny]
        edges += [limits.max, sys.float_info.max]
        boundaries = np.unique([*edges, *np.linspace(-3, 3, repeat)])
        assert_equal_backends(around(boundaries, dtype), around(boundaries, dtype).flip(0), table_with(boundaries))

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("bits", [1, 3, 8])
    def test_sizes_about_groups_and_blocks(self, dtype, bits, n):
        assert_equal_backends(normal(n, dtype), normal(n, dtype, 1), table_of_bits(bits))

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("beside", [-1, 0, 1])
    def test_sizes_about_the_splits_between_threads(self, dtype, beside, count, threads):
        threads(count)
        n = count * team.BLOCKS_PER_THREAD * BLOCK + beside
        assert_equal_backends(normal(n, dtype), normal(n, dtype, 1), table_of_bits(3))

    def test_strides_of_the_gradient_are_kept(self, dtype):
        grad = normal(2 * 3 * 5 * 7, dtype).view(2, 3, 5, 7).to(memory_format=torch.channels_last)
        key = key_of(table_of_bits(2))
        assert cpu.multiply(grad, cpu.encode(grad, key), key).stride() == grad.stride()


@pytest.mark.parametrize("dtype", HALVES)
class TestEveryHalf:
    """16-bit types are small enough to try every number that there is."""

    @pytest.mark.parametrize("bits", [1, 3, 8])
    def test_is_encoded_as_the_table_encodes_it(self, dtype, bits):
        table = table_of_bits(bits)
        x = all_halves(dtype)
        codes = unpack(cpu.encode(x, key_of(table)), bits, x.numel())
        assert np.array_equal(codes.numpy(), table.encode(x.double().numpy()))

    @pytest.mark.parametrize("level", [1.0, 0.0, 3e-8, 1.0 / 3, -1.7, 70000.0, 1e30, 1e-42, 1 + 2.0**-9])
    def test_times_a_level_is_the_float32_product_rounded_once(self, dtype, level):
        """Subnormals, ties, overflow to infinity: all of them are among 2^16 numbers. A level of 0 selects 0."""
        table = table_with([0.0])
        levels = table.levels.copy()
        levels[5] = level
        table = type(table)("gelu", "shared", "uniform:-10,10", [0.0], [5, 5], levels, 1.0)
        grad = all_halves(dtype)
        packed = pack(torch.full((grad.numel(),), 5, dtype=torch.uint8), 8)
        once = (grad.float() * torch.tensor(level, dtype=torch.float32)).to(dtype) if level else torch.zeros_like(grad)
        assert_same_bits(cpu.multiply(grad, packed, key_of(table)), once)


def assert_same_activation(x, function):
    """f(x) and codes of both backends, bit for bit but for which NaN it is: torch gives either, by the place."""
    key = key_of(table_of_bits(3))
    parameters = parameters_of(function) if function in FORWARDS else []
    (y, packed), (expected_y, expected_packed) = (b.activation(x, function, parameters, key) for b in (cpu, reference))
    assert y.stride() == expected_y.stride()
    number = ~expected_y.isnan()
    assert torch.equal(y.isnan(), ~number)
    assert_same_bits(y[number], expected_y[number])
    assert torch.equal(packed, expected_packed)


@pytest.mark.parametrize("dtype", HALVES)
class TestLargeTensorsOfHalves:
    """Of these f(x) and code may be looked up."""

    @pytest.fixture
    def x(self, dtype):
        """Every number at many places, and a last few that fill no vector."""
        every = all_halves(dtype)
        shuffled = every[torch.randperm(every.numel(), generator=torch.Generator().manual_seed(0))]
        return torch.cat([every, shuffled, shuffled.flip(0), shuffled, normal(37, dtype)])

    @pytest.mark.parametrize("function", [*FORWARDS, "x*sigmoid(2*x)"])
    def test_are_as_torch_computes_them(self, function, dtype, x):
        assert_same_activation(x, function)

    @pytest.mark.parametrize("function", ["gelu", "silu"])
    def test_in_any_layout(self, function, dtype, x):
        x = x[: 64 * 16 * 256].view(1, 64, 16, 256)
        for laid_out in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 3), x[:, :, ::2], x.mT[..., :63]):
            assert_same_activation(laid_out, function)

    def test_are_not_looked_up_where_torch_rounds_the_last_ones_otherwise(self, dtype):
        assert cpu._values("softshrink", (0.5,), dtype, True) is None
        assert cpu._values("silu", (), dtype, True) is not None

    def test_of_a_callable_are_what_it_returns_now(self, dtype, x):
        factor = 2.0
        ours = custom(lambda x: x * factor)
        cpu.activation(x, ours.function, (), key_of(table_of_bits(3)))
        factor = 3.0
        y, _ = cpu.activation(x, ours.function, (), key_of(table_of_bits(3)))
        assert torch.equal(y.nan_to_num(), (x * 3.0).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_padding_bits_are_zero(bits, dtype):
    """All codes are the highest, so any bit that leaks past the last code would show."""
    table = table_of_bits(bits, "interval")
    for n in (1, 2, 5, 7, 8, BLOCK + 3):
        packed = cpu.encode(torch.full((n,), torch.inf, dtype=dtype), key_of(table))
        number = int.from_bytes(bytes(packed.tolist()), "little")
        assert packed.numel() == packed_size(n, bits)
        assert number == (1 << (n * bits)) - 1


def test_nothing_is_written_past_the_end(monkeypatch):
    """The packed bytes and the product are handed larger memory: what follows them stays as it was."""
    whole = []

    def roomy(size, **keywords):
        whole.append(torch.full((size + 64,), 0xA5, **keywords))
        return whole[-1][:size]

    monkeypatch.setattr(torch, "empty", roomy)
    for bits in range(1, 9):
        for n in (1, 9, BLOCK, BLOCK + 1, 4 * BLOCK - 1):
            cpu.encode(torch.zeros(n), key_of(table_of_bits(bits)))
            assert (whole[-1][packed_size(n, bits) :] == 0xA5).all()


@pytest.mark.parametrize(
    "packed",
    [
        torch.zeros(11, dtype=torch.uint8),
        torch.zeros(13, dtype=torch.uint8),
        torch.zeros(12, dtype=torch.int8),
        torch.zeros(24, dtype=torch.uint8)[::2],
        torch.zeros(3, 4, dtype=torch.uint8),
    ],
)
def test_a_packed_code_of_another_size_or_layout_is_refused(packed):
    key = key_of(table_of_bits(3))
    with pytest.raises(RuntimeError, match=r"^30 codes of 3 bits take 12 bytes, not "):
        cpu.multiply(torch.zeros(30), packed, key)


def test_results_lie_on_the_cpu_whatever_the_default_device():
    table = table_of_bits(3, seed=1234)
    x = normal(2 * GROUP + 1, torch.float32)
    with torch.device("meta"):
        packed = cpu.encode(x, key_of(table))
        product = cpu.multiply(x, packed, key_of(table))
    assert packed.device == product.device == torch.device("cpu")
    assert torch.equal(packed, reference.encode(x, key_of(table)))
