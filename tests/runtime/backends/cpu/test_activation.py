"""What only the CPU's activation kernels have: splits between threads, f(x) of 16-bit types looked up.

What they share with other backends is in ../test_activation.py.
"""

import pytest
import torch
from fewbit.runtime.activations.arguments import custom
from fewbit.runtime.backends.cpu import activation as cpu
from fewbit.runtime.backends.cpu import threads as team
from fewbit.runtime.backends.cpu.activation_kernels import BLOCK
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.tensors.packing import GROUP
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import (
    DTYPES,
    HALVES,
    all_halves,
    around,
    assert_same_bits,
    key_of,
    normal,
    parameters_of,
    table_of_bits,
)
from strategies import tables


def assert_equal_backends(x, grad, table):
    """encode of x and multiply of grad by the codes of x."""
    key = key_of(table)
    packed = reference.encode(x, key)
    assert torch.equal(cpu.encode(x, key), packed)
    assert_same_bits(cpu.multiply(grad, packed, key), reference.multiply(grad, packed, key))


@pytest.mark.parametrize("dtype", DTYPES)
class TestAgainstTheReference:
    @pytest.mark.sample(1)
    @given(data=st.data())
    def test_any_table_on_any_number(self, dtype, data):
        table = data.draw(tables())
        x = around(table.boundaries, dtype)
        drawn = data.draw(st.lists(st.floats(), max_size=20))
        x = torch.cat([x, torch.tensor(drawn, dtype=torch.float64).to(dtype)])
        assert_equal_backends(x, x.flip(0), table)

    @pytest.mark.sample(5)
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("beside", [-1, 0, 1])
    def test_sizes_about_the_splits_between_threads(self, dtype, beside, count, threads):
        threads(count)
        n = count * team.BLOCKS_PER_THREAD * BLOCK + beside
        assert_equal_backends(normal(n, dtype), normal(n, dtype, 1), table_of_bits(3))


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

    @pytest.mark.sample(17)
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

    def test_of_slopes_of_0_and_minus_0_are_two(self, dtype, x):
        for slope in (0.0, -0.0):
            y, _ = cpu.activation(x, "leaky_relu", [slope], key_of(table_of_bits(3)))
            assert torch.equal(y.signbit(), torch.nn.functional.leaky_relu(x, slope).signbit())

    def test_are_torch_s_while_subnormal_numbers_are_flushed_and_after(self, dtype, x):
        for flushes in (True, False):
            torch.set_flush_denormal(flushes)
            try:
                y, _ = cpu.activation(x, "hardswish", [], key_of(table_of_bits(2)))
                expected = torch.nn.functional.hardswish(x)
            finally:
                torch.set_flush_denormal(False)
            same = (y.view(torch.int16) == expected.view(torch.int16)) | y.isnan()
            assert same.all()

    def test_of_a_callable_are_what_it_returns_now(self, dtype, x):
        factor = 2.0
        ours = custom(lambda x: x * factor)
        cpu.activation(x, ours.function, (), key_of(table_of_bits(3)))
        factor = 3.0
        y, _ = cpu.activation(x, ours.function, (), key_of(table_of_bits(3)))
        assert torch.equal(y.nan_to_num(), (x * 3.0).nan_to_num())


def test_packed_codes_with_gaps_are_refused():
    packed = torch.zeros(24, dtype=torch.uint8)[::2]
    with pytest.raises(RuntimeError, match=r"^30 codes of 3 bits take 12 bytes, not "):
        cpu.multiply(torch.zeros(30), packed, key_of(table_of_bits(3)))


def test_results_lie_on_the_cpu_whatever_the_default_device():
    table = table_of_bits(3, seed=1234)
    x = normal(2 * GROUP + 1, torch.float32)
    with torch.device("meta"):
        packed = cpu.encode(x, key_of(table))
        product = cpu.multiply(x, packed, key_of(table))
    assert packed.device == product.device == torch.device("cpu")
    assert torch.equal(packed, reference.encode(x, key_of(table)))
