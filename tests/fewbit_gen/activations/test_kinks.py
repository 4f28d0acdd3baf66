import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, solve
from fewbit.fewbit_gen.activations import as_activation
from fewbit.fewbit_gen.activations.kinks import grid, is_step, jumps, reach_of, switched
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st

places = st.floats(-1e6, 1e6) | st.floats(-1, 1) | st.integers(-100, 100).map(float)


@given(places)
def test_a_condition_is_followed_to_the_last_double(place):
    assert switched(lambda x: (x > place)[None]).tolist() == [place]


# Larger than what the smooth part moves within a cell of the grid.
@given(places, st.floats(0.05, 1e3), st.booleans())
def test_a_jump_is_followed_to_the_last_double(place, size, falling):
    sign = -1 if falling else 1
    assert jumps(lambda x: np.where(x > place, sign * size, 0.0) + 1 / (1 + x * x)).tolist() == [place]


def test_rounding_infinities_and_numbers_that_are_none_are_no_jumps():
    assert jumps(lambda x: np.cos(x) + 1e-13 * np.sin(1e17 * x)).size == 0
    assert jumps(lambda x: 1 - np.tanh(x) ** 2).size == 0  # all its digits cancel far out
    with np.errstate(all="ignore"):
        assert jumps(lambda x: np.exp(x)).size == 0
        assert jumps(lambda x: np.log(x)).size == 0


def test_the_grid_knows_whole_numbers_and_hundredths():
    assert {-100.0, -3.0, 0.0, 0.5, 6.0} <= set(grid().tolist())


def test_a_step_is_constant_to_the_last_bit_and_what_its_function_rises_by():
    assert is_step(lambda x: np.where(x > 1, 2.0, 3.0), (1.0,))
    assert not is_step(lambda x: np.where(x > 1, 2.0, 3.0), ())
    assert not is_step(lambda x: np.where(x > 1, 2.0, 3.0 + 1e-15 * x), (1.0,))
    assert not is_step(lambda x: np.full_like(x, np.nan), ())
    one = np.ones_like
    assert is_step(one, (), lambda x: x)
    assert is_step(one, (0.5,), lambda x: x + (x > 0.5))  # a jump of f at a kink is no slope
    assert not is_step(one, (), lambda x: x + 1e-4 * np.tanh(1e6 * (x - 3.1234567)))


@pytest.mark.parametrize(
    ("text", "kinks"),
    [
        ("where((x-5.00390625)**2<2**-20,9,1)*x", [5.0029296875, np.nextafter(5.0048828125, 0)]),
        ("where((x-5.00390625)**2<=2**-20,9,1)*x", [np.nextafter(5.0029296875, 0), 5.0048828125]),
        ("where((x-0.001953125)**2<2**-60,9,1)*x", [0.001953125 - 2**-30, np.nextafter(0.001953125 + 2**-30, 0)]),
        ("max(min(8*(x-5.00390625),2**-10),-2**-10)", [5.00390625 - 2**-13, 5.00390625 + 2**-13]),
        ("where((x-5.00390625)**2<2**-20,9,where(x>1,2,1))*(x-1)", [1, 5.0029296875, np.nextafter(5.0048828125, 0)]),
    ],
)
def test_a_step_between_two_points_of_the_grid_is_found(text, kinks):
    activation = parse_activation(text)
    assert activation.step
    assert [kink for kink in activation.kinks if kink != 5.00390625] == kinks
    table = solve(text, levels=3)
    assert (table.error, table.lower_bound) == (0, 0)
    assert table.boundaries.tolist() == kinks


def test_reach():
    assert reach_of(lambda x: np.exp(-x * x)) == pytest.approx(6, abs=0.2)
    assert reach_of(np.cos) == np.inf
    assert reach_of(lambda x: np.full_like(x, np.nan)) == np.inf


class TestGiven:
    """Kinks that the user knows of."""

    def test_join_those_that_are_known(self):
        assert parse_activation("relu", [3, -1]).kinks == (-1.0, 0.0, 3.0)
        assert parse_activation("relu", [0]).kinks == (0.0,)
        assert parse_activation("relu", []).kinks == (0.0,)

    def test_change_no_table_where_there_is_nothing(self):
        assert solve("relu", kinks=[3]) == solve("relu")
        assert solve("gelu", bits=2, kinks=[20]).error == pytest.approx(solve("gelu", bits=2).error, rel=1e-9)

    def test_show_what_would_be_overlooked(self):
        low, high = 5.0029296875, 5.0048828125

        def derivative(x):  # of which nothing but values is known, and a dense grid has none there
            return np.where((x > low) & (x < high), 9.0, 1.0)

        assert as_activation(np.abs, (), derivative).kinks == ()
        table = solve(np.abs, bits=1, kinks=[low, high], derivative=derivative)
        assert table.boundaries.tolist() == [low, np.nextafter(high, 0)]
        assert table([5.0, 5.004, 5.1]).tolist() == [1.0, 9.0, 1.0]

    def test_lie_before_the_point_where_f_takes_the_value_from_the_right(self):
        def derivative(x):
            return np.where(x < 2, 1.0, np.where(x <= 3, 5.0, 7.0))

        activation = as_activation(np.sin, [2, 3], derivative)
        assert activation.kinks == (np.nextafter(2, 0), 3.0)
        assert activation.derivative(np.array([*activation.kinks, 2.0])).tolist() == [1.0, 5.0, 5.0]

    @pytest.mark.parametrize("kinks", [[np.nan], [np.inf], ["3"], [None], [True], [1j]])
    def test_are_finite_numbers(self, kinks):
        with pytest.raises(FewbitError, match="a kink is a finite number, not"):
            solve("gelu", kinks=kinks)
