import math

import numpy as np
import pytest
import torch
from fewbit.runtime.tensors.levels import prepare, register_table, round_down, table_of
from fewbit.runtime.tensors.traits import arithmetic_dtype
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import DTYPES, HALVES, all_halves, around, table_of_bits, table_with
from strategies import finite, tables

CPU = torch.device("cpu")


def numbers_of(dtype):
    """Every finite number of a 16-bit type and both infinities, in order, as doubles."""
    x = all_halves(dtype).double()
    return torch.unique(x[~x.isnan()])


class TestRoundDown:
    @pytest.mark.parametrize("dtype", HALVES)
    @given(values=st.lists(finite | st.floats(-70000, 70000) | st.floats(-1e-4, 1e-4), min_size=1, max_size=20))
    def test_gives_the_largest_half_not_above(self, dtype, values):
        all_numbers = numbers_of(dtype)
        exact = torch.tensor(values, dtype=torch.float64)
        expected = all_numbers[torch.searchsorted(all_numbers, exact, right=True) - 1]
        assert torch.equal(round_down(np.array(values), dtype).double(), expected)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_keeps_every_half_and_steps_down_between_them(self, dtype):
        numbers = numbers_of(dtype)[1:-1]
        assert torch.equal(round_down(numbers.numpy(), dtype).double(), numbers)
        just_below = np.nextafter(numbers.numpy(), -math.inf)
        assert torch.equal(round_down(just_below, dtype).double(), numbers_of(dtype)[:-2])

    @given(st.lists(finite | st.floats(-1e-37, 1e-37) | st.floats(-4e38, 4e38), min_size=1, max_size=20))
    def test_gives_the_largest_single_not_above(self, values):
        result = round_down(np.array(values), torch.float32)
        up = torch.nextafter(result, torch.tensor(torch.inf))
        exact = torch.tensor(values, dtype=torch.float64)
        assert (result.double() <= exact).all()
        assert (up.double() > exact).all()

    @given(st.lists(finite, min_size=1, max_size=20))
    def test_keeps_doubles(self, values):
        assert round_down(np.array(values), torch.float64).tolist() == values


@pytest.mark.parametrize("dtype", DTYPES)
class TestComparison:
    def test_a_number_is_beyond_a_boundary_exactly_if_it_is_beyond_the_rounded_one(self, dtype):
        boundaries = np.sort(np.concatenate([np.random.default_rng(0).normal(0, 4, 200), [-1e300, 1e300, 1e-320]]))
        x = around(boundaries, dtype)
        x = x[~x.isnan()]
        rounded = round_down(boundaries, dtype)
        exact = torch.from_numpy(boundaries)
        assert torch.equal(x[:, None] > rounded, x.double()[:, None] > exact)

    def test_levels_are_in_the_dtype_of_arithmetic(self, dtype):
        table = table_of_bits(3)
        prepared = prepare(register_table(table), dtype, CPU)
        assert prepared.levels.dtype == arithmetic_dtype(dtype) != torch.float16
        assert prepared.levels.tolist() == table.levels.astype(str(prepared.levels.dtype)[6:]).tolist()
        assert prepared.codes.tolist() == table.codes.tolist()
        assert prepared.bits == 3

    def test_a_prepared_table_lies_on_its_device_whatever_the_default(self, dtype):
        key = register_table(table_of_bits(4, seed=99))
        with torch.device("meta"):
            prepared = prepare(key, dtype, CPU)
        assert {t.device for t in (prepared.boundaries, prepared.codes, prepared.levels)} == {CPU}

    def test_a_level_beyond_the_range_becomes_infinite_without_a_warning(self, dtype):
        table = table_with([0.0])
        levels = prepare(register_table(table), dtype, CPU).levels
        assert levels[0].item() == pytest.approx(1e30)


@given(tables())
def test_registered_tables_are_found_by_their_key(table):
    key = register_table(table)
    assert key == table.key
    assert table_of(key).key == key
    assert register_table(table) == key


def test_an_unknown_key_is_told_in_one_line():
    with pytest.raises(FewbitError, match=r"^no table 'nothing' in this process: make .*$") as caught:
        table_of("nothing")
    assert "\n" not in str(caught.value)
