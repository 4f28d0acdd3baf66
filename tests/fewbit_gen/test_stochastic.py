"""Kind `stochastic`: levels to round to at random, without bias and with the least variance."""

from functools import partial
from itertools import combinations

import fewbit
import numpy as np
import pytest
from fewbit import FewbitError
from fewbit.fewbit_gen import parse_activation, parse_weight, solve
from fewbit.fewbit_gen.build import ACTIVATIONS
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.lower_bound import certificate
from fewbit.fewbit_gen.moments import Moments
from fewbit.fewbit_gen.monge import best_cuts, prefix
from fewbit.fewbit_gen.solver import problem_moments, uniform_error
from fewbit.fewbit_gen.stochastic import Segments, covered, everywhere, is_bounded, range_of
from fewbit.runtime.backends.cuda.codegen import cuda_header
from fewbit.tables import Table
from fewbit.tables.exporters import csv_rows, export
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

WEIGHTS = ("uniform:-10,10", "normal:0,1", "normal:0,0.3")
SMOOTH = ("gelu", "silu", "selu", "tanh", "sigmoid", "softplus", "elu", "gaussian", "hardswish")


def variance(values, mass, levels):
    """The mean square error of rounding to neighbouring levels, value by value."""
    at = np.clip(np.searchsorted(levels, values, side="right") - 1, 0, len(levels) - 2)
    a, b = levels[at], levels[at + 1]
    return float(((b - values) * (values - a) * mass).sum())


lines = st.integers(2, 10).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-40, 40), min_size=n, max_size=n, unique=True),
        st.lists(st.sampled_from([0.0, 1.0, 2.5, 1e-3]), min_size=n, max_size=n).filter(any),
    )
)


@given(lines, st.integers(2, 5))
def test_cuts_are_as_good_as_trying_all_levels(line, K):
    values, mass = (np.asarray(row, float) for row in line)
    order = np.argsort(values)
    values, mass = values[order], mass[order]
    sums = prefix(np.stack([mass, values * mass, values**2 * mass]))[:, 1:]
    problem = np.stack([*sums, values, np.zeros(values.size)])
    K = min(K, values.size)
    found = variance(values, mass, values[best_cuts(problem, K - 1)])
    tried = (
        variance(values, mass, np.concatenate([values[:1], inner, values[-1:]]))
        for inner in combinations(values[1:-1], K - 2)
    )
    assert found <= min(tried) + 1e-12 * (values**2 * mass).sum()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", SMOOTH)
class TestTable:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_is_proven_and_no_worse_than_equal_distances(self, activation, weight, bits):
        table = solve(activation, bits, "stochastic", weight, effort=None)
        assert table.levels.size == 2**bits
        assert 0 <= table.error - table.lower_bound <= 1e-6 * table.error
        act, w = parse_activation(activation), parse_weight(weight)
        assert table.error <= uniform_error(act, w, 2**bits) * (1 + 1e-9)
        assert table.error == pytest.approx(table_error(table, act, w), rel=1e-12)

    @pytest.mark.sample(9)
    def test_has_no_bias_anywhere(self, activation, weight):
        """Wherever the weight lies: f' is between the two levels at every x."""
        table = solve(activation, 3, "stochastic", weight, certify=False)
        x = np.concatenate([np.linspace(-60, 60, 40_001), [-1e6, 1e6, 1e300, -1e300]])
        f = parse_activation(activation).derivative(x)
        below, above = table.around(x)
        room = 1e-7 * np.ptp(table.levels)  # f' at a boundary, which is a double; and where f' has not settled
        assert (below <= f + room).all() and (f <= above + room).all()


def test_states_the_variance_of_draws():
    table = solve("gelu", 2, "stochastic", "normal:0,1", certify=False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(400_000)
    f = parse_activation("gelu").derivative(x)
    below, above = table.around(x)
    q = np.where(rng.random(x.size) * (above - below) < f - below, above, below)
    error = (q - f) ** 2
    assert error.mean() == pytest.approx(table.error, abs=5 * error.std() / x.size**0.5)
    assert abs((q - f).mean()) <= 5 * (q - f).std() / x.size**0.5


@pytest.mark.deep
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SMOOTH), st.sampled_from(WEIGHTS), st.integers(0, 2**31), st.sampled_from([4, 6, 8]))
def test_no_levels_are_below_the_bound(activation, weight, seed, K):
    """Those of a search from random levels, which a wrong proof would lie above."""
    act, w = parse_activation(activation), parse_weight(weight)
    bound = solve(act, None, "stochastic", w, levels=K).lower_bound
    moments = problem_moments(act, w, "stochastic", K)
    low, high = range_of(act, moments)
    rng = np.random.default_rng(seed)
    best = solve(act, None, "stochastic", w, levels=K, certify=False).levels - moments.centre
    near = np.sort(best[1:-1] + rng.normal(0, 10.0 ** rng.uniform(-6, -1), K - 2) * (high - low))
    levels = np.unique(np.clip([low, *near, high], low, high))
    assert Segments.of(moments, levels).error >= bound * (1 - 1e-12)


def test_the_bound_of_a_worse_table_holds_too():
    """A table that is not the best is told so, or gets a bound that the best one meets."""
    act, w = parse_activation("gelu"), parse_weight("normal:0,1")
    best = solve(act, 3, "stochastic", w)
    moments = problem_moments(act, w, "stochastic", 8)
    ends = range_of(act, moments)
    found = Segments.of(moments, np.linspace(*ends, 8))
    levels, codes = found.levels + moments.centre, found.codes.astype(np.uint8)
    worse = Table("gelu", "stochastic", w.spec, found.cuts, codes, levels, found.error)
    result = certificate(moments, worse, 8)
    assert result.bound <= best.error
    assert result.better is not None and Segments.of(moments, result.better).error < worse.error


def test_covers_what_lies_beyond_the_weight():
    narrow = solve("gelu", 2, "stochastic", "normal:0,0.01")
    wide = solve("gelu", 2, "stochastic", "uniform:-10,10")
    np.testing.assert_allclose(narrow.levels[[0, -1]], wide.levels[[0, -1]], rtol=0, atol=1e-12)
    assert narrow.error < 0.1 * wide.error / 20


def bias(activation, table, x):
    f = parse_activation(activation).derivative(x)
    below, above = table.around(x)
    return np.maximum(below - f, f - above).max() / np.ptp(table.levels)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("activation", "far"),
    [
        ("tanh(x)+3*tanh(x-5000)", 5000.0),
        ("gelu(x)-2*exp(-(x-200.123)**2)", 200.8),
        ("where(x>1000,2*x,tanh(x))", 1e6),
        ("silu(beta=0.01)", 240.0),
        ("sqrt(1+x*x)", -1e9),
    ],
)
def test_covers_what_lies_far_from_the_weight(activation, far):
    table = solve(activation, 2, "stochastic", "normal:0,1", certify=False)
    low, high = covered(parse_activation(activation), parse_weight("normal:0,1"))
    assert low <= -1e9 and high >= 1e9
    x = np.concatenate([np.linspace(far - 10, far + 10, 2001), np.geomspace(1, 1e9, 20_001), -np.geomspace(1, 1e9, 99)])
    assert bias(activation, table, x) <= 2**-9


@pytest.mark.parametrize("activation", ["x+sin(x)", "sin(0.01*x)", "sin"])
def test_says_where_it_covers_a_derivative_that_never_settles(activation):
    table = solve(activation, 2, "stochastic", "uniform:-50,3", certify=False)
    ends = covered(parse_activation(activation), parse_weight("uniform:-50,3"))
    assert ends == (-50, 40) and bias(activation, table, np.linspace(*ends, 20_001)) <= 1e-8


@pytest.mark.parametrize(
    ("activation", "named"),
    [
        ("x/(1+exp(-x))", "silu"),
        ("1/(1+exp(-x))", "sigmoid"),
        ("log(1+exp(x))", "softplus"),
        ("tanh(log(1+exp(x)))*x", "mish"),
    ],
)
def test_parts_that_overflow_far_out_do_not_grow(activation, named):
    table = solve(activation, 2, "stochastic", "normal:0,1", certify=False)
    expected = fewbit.load_table(named, 2, "stochastic", weight="normal:0,1")
    np.testing.assert_allclose(table.levels, expected.levels, rtol=0, atol=1e-8)
    assert table.error == pytest.approx(expected.error, rel=1e-8)


@pytest.mark.parametrize("weight", ["normal:0.0317,1e-4", "laplace:0,1e-4", "0.5*normal:0,1e-5+0.5*uniform:0,0.01"])
def test_narrow_weights_are_integrated(weight):
    """With 2 levels the error is (b − f')(f' − a) near the weight, whose grid had less than a cell there."""
    table = solve("gelu", 1, "stochastic", weight)
    w, f = parse_weight(weight), parse_activation("gelu").derivative
    ends = [*w.breakpoints, *np.linspace(*w.domain, 9)]
    value = quad(lambda x: (table.levels[1] - f(x)) * (f(x) - table.levels[0]) * w.density(np.array([x]))[0],
                 *w.domain, points=sorted(set(ends))[1:-1], limit=900)[0]  # fmt: skip
    assert table.error == pytest.approx(value, rel=1e-7)


def test_a_weight_where_the_derivative_does_not_vary():
    table = solve("gelu", 2, "stochastic", "normal:500,1")
    assert table.error == 0 and table.levels[0] < -0.12 and table.levels[-1] > 1.12


@pytest.mark.parametrize("activation", ["squared_relu", "x*x*x", "exp(x)", "x*log(1 + x*x)", "exp(0.01*x)"])
def test_a_derivative_without_bounds_is_refused(activation):
    with pytest.raises(FewbitError, match=r"^the derivative of [^\n]* grows without limit: [^\n]*$"):
        solve(activation, 3, "stochastic")


def test_which_shipped_activations_have_bounds():
    assert [name for name in ACTIVATIONS if not is_bounded(parse_activation(name))] == ["squared_relu"]


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "relu6", "hardtanh"])
def test_a_derivative_of_few_values_is_exact(activation):
    table = solve(activation, 3, "stochastic")
    assert table.error == 0
    x = np.linspace(-8, 8, 1001)
    assert (table.around(x)[0] == parse_activation(activation).derivative(x)).all()


def test_a_constant_derivative_has_one_level():
    table = solve("3*x", 2, "stochastic")
    assert table.levels.tolist() == [3.0] and table.error == 0


@pytest.mark.parametrize("factor", ["1e-30", "1e40"])
def test_of_any_scale(factor):
    one, scaled = (solve(f"{c}*tanh(x)", 3, "stochastic", "normal:0,1") for c in ("1", factor))
    np.testing.assert_allclose(scaled.levels, one.levels * float(factor), rtol=1e-9, atol=float(factor) * 1e-12)
    assert scaled.error == pytest.approx(one.error * float(factor) ** 2, rel=1e-9)


def test_the_weights_own_domain_is_kept_where_it_is_wide_enough():
    w = parse_weight("uniform:-50,50")
    assert everywhere(parse_activation("gelu"), w) is w
    wide = everywhere(parse_activation("gelu"), parse_weight("uniform:-1,1"))
    assert wide.domain == (-40, 40) and wide.density(np.array([-2.0, -0.5, 2.0])).tolist() == [0, 1, 0]


def test_is_written_and_read(tmp_path):
    table = solve("silu", 3, "stochastic", "normal:0,1")
    table.to_json(tmp_path / "t.json")
    assert Table.from_json(tmp_path / "t.json") == table
    rows = csv_rows(table).splitlines()
    assert rows[0] == "above,up_to,code,level,or_level" and len(rows) == table.codes.size + 1


def test_is_no_function_of_x_to_export():
    """A CUDA header would always take the lower level."""
    table = solve("silu", 2, "stochastic")
    for write in (partial(export, table, "python"), partial(export, table, "c"), partial(cuda_header, table, "silu")):
        with pytest.raises(FewbitError, match="has no one value at x"):
            write()


def test_levels_that_do_not_increase_are_refused():
    with pytest.raises(FewbitError, match="strictly increasing"):
        Table("gelu", "stochastic", "normal:0,1", [0.0], [0, 1], [0.0, 1.0, 1.0], 0.1)


def test_moments_agree_with_the_sum_over_segments():
    act, w = parse_activation("selu"), parse_weight("uniform:-10,10")
    table = solve(act, 3, "stochastic", w)
    moments = Moments.of(act, everywhere(act, w), 4096)
    error, rounding = moments.error(table)
    assert abs(error - table.error) <= rounding + 1e-9 * table.error
