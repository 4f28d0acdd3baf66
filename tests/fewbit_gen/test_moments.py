import math

import numpy as np
import pytest
from exact import DERIVATIVES, KINKS, WEIGHTS, integrate, mp
from fewbit.fewbit_gen import parse_activation, parse_weight, solve
from fewbit.fewbit_gen.activations import Activation
from fewbit.fewbit_gen.grid import evaluate_derivative, grid, quadrature, resolved_grid
from fewbit.fewbit_gen.moments import Moments
from fewbit.tables import FewbitError
from fewbit.tables.shipped import WEIGHTS as SHIPPED_WEIGHTS
from fewbit.tables.shipped import shipped_activations
from numpy.polynomial import Polynomial

EPS = 2.0**-53
CASES = [(a, w) for a in ("gelu", "selu", "softplus(threshold=2)") for w in WEIGHTS]


def problem(activation, weight, cells=512, order=8):
    return Moments.of(parse_activation(activation), parse_weight(weight), cells, order)


def exact_moments(activation, weight, centre, a, b):
    f, w, c = DERIVATIVES[activation], WEIGHTS[weight], mp.mpf(centre)
    powers = (lambda x: w(x), lambda x: (f(x) - c) * w(x), lambda x: (f(x) - c) ** 2 * w(x))
    return [integrate(power, [a, b], activation) for power in powers]


@pytest.mark.parametrize(("activation", "weight"), CASES)
def test_cells_are_the_integrals(activation, weight):
    """To 64 last digits of the cell's mass: f' and the weight carry some each, squared and summed over 8 nodes."""
    moments = problem(activation, weight)
    kinks = np.searchsorted(moments.edges, KINKS.get(activation, []))
    for cell in {*range(0, moments.edges.size - 1, 61), *kinks, *(kinks - 1)}:
        a, b = moments.edges[[cell, cell + 1]]
        exact = exact_moments(activation, weight, moments.centre, a, b)
        for value, expected in zip(moments.cells[:, cell].tolist(), exact, strict=True):
            assert abs(value - expected) <= 64 * EPS * exact[0]


@pytest.mark.parametrize(("activation", "weight"), CASES)
def test_between_any_points_are_the_integrals(activation, weight):
    """To 64 last digits of the whole mass: they are differences of sums from the grid's start."""
    moments = problem(activation, weight)
    low, high = moments.edges[[0, -1]]
    kinks = [k for k in KINKS.get(activation, []) if low < k < high]
    inside = np.random.default_rng(1).uniform(low, high, 5)
    points = np.unique(np.concatenate([[low, high], inside, kinks, moments.edges[100:102]]))
    value = moments.between(points)
    for i in range(points.size - 1):
        exact = exact_moments(activation, weight, moments.centre, points[i], points[i + 1])
        for got, expected in zip(value[:, i].tolist(), exact, strict=True):
            assert abs(got - expected) <= 64 * EPS * moments.prefix[0, -1]


@pytest.mark.parametrize(("activation", "weight"), CASES)
def test_prefix_sums_the_cells(activation, weight):
    moments = problem(activation, weight)
    assert moments.prefix.shape == (3, moments.edges.size)
    assert not moments.prefix[:, 0].any()
    for row, sums in zip(moments.cells, moments.prefix, strict=True):
        exact = [math.fsum(row[:i]) for i in range(row.size + 1)]
        assert np.abs(sums - exact).max() <= 2 * EPS * math.fsum(np.abs(row))


def test_derivative_is_centred_at_its_weighted_mean():
    moments = problem("gelu", "normal:0.5,2")
    w, fw, _ = moments.prefix[:, -1]
    assert abs(fw) <= 16 * EPS * w


@pytest.mark.parametrize(("activation", "weight"), [("gelu", "normal:-30,4"), ("softplus", "normal:-40,4")])
def test_the_error_of_a_table_in_a_far_tail_is_off_by_no_more_than_is_said(activation, weight):
    table = solve(activation, bits=2, weight=weight)  # whose error is a sum over its segments, without differences
    error, rounding = Moments.of(parse_activation(activation), parse_weight(weight), 4096).error(table)
    assert abs(error - table.error) <= rounding + 1e-9 * table.error


def test_moments_of_an_interval_of_no_width_are_zero():
    assert not problem("gelu", "uniform:-10,10").between(np.array([0.3, 0.3])).any()


@pytest.mark.parametrize("order", [1, 4, 8, 32])
def test_quadrature_is_exact_to_its_degree(order):
    polynomial = Polynomial(np.random.default_rng(order).normal(size=2 * order))
    left, right = np.array([-0.5, 0.25, 0.75]), np.array([0.25, 0.75, 0.875])
    x, dx = quadrature(left, right, order)
    exact = polynomial.integ()(right) - polynomial.integ()(left)
    assert (polynomial(x) * dx).sum(axis=1) == pytest.approx(exact, rel=0, abs=64 * EPS * np.abs(polynomial.coef).sum())


class TestGrid:
    @pytest.mark.parametrize(
        "weight",
        ["uniform:-10,10", "uniform:-1e6,3", "uniform:-1e9,1e9", "uniform:50,60", "uniform:-90,-80", "normal:0,500"],
    )
    @pytest.mark.parametrize("activation", ["gelu", "selu", "softplus(beta=1000)", "softplus(beta=0.01)"])
    @pytest.mark.parametrize("cells", [1, 10, 1000])
    def test_covers_the_domain_and_resolves_the_derivative(self, activation, weight, cells):
        act, w = parse_activation(activation), parse_weight(weight)
        edges = grid(act, w, cells)
        low, high = w.domain
        assert (edges[0], edges[-1]) == (low, high)
        assert np.all(np.diff(edges) > 0)
        assert edges.size <= 1.125 * cells + 4 + len(act.kinks)
        near = edges[np.abs(edges) <= act.reach * (1 + 4 * EPS)]
        width = min(high, act.reach) - max(low, -act.reach)
        assert width <= 0 or np.diff(near).max() <= width / cells * (1 + 1e-9)

    def test_has_every_kink_inside_the_domain_for_an_edge(self):
        act = parse_activation("softplus(beta=3,threshold=7)")
        assert np.isin(act.kinks, grid(act, parse_weight("uniform:-10,10"), 100)).all()
        assert not np.isin(act.kinks, grid(act, parse_weight("uniform:-1,1"), 100)).any()


class TestResolvedGrid:
    @pytest.mark.parametrize("weight", SHIPPED_WEIGHTS)
    @pytest.mark.parametrize("activation", shipped_activations())
    def test_adds_nothing_to_what_is_shipped(self, activation, weight):
        act, w = parse_activation(activation), parse_weight(weight)
        assert np.array_equal(resolved_grid(act, w, 4096, 8), grid(act, w, 4096))

    @pytest.mark.parametrize("at", [0.0, -9.3, 3.1234567])
    @pytest.mark.parametrize("steepness", [1e3, 1e5, 1e7])
    def test_sees_what_is_narrower_than_a_cell(self, steepness, at):
        act = parse_activation(f"tanh({steepness}*(x-({at})))")
        edges = resolved_grid(act, parse_weight("uniform:-10,10"), 512, 8)
        assert edges.size < 700
        x, dx = quadrature(edges[:-1], edges[1:], 8)
        slope = act.derivative(x)
        assert (slope * dx).sum() == pytest.approx(2, rel=1e-5)
        assert (slope**2 * dx).sum() == pytest.approx(4 / 3 * steepness, rel=1e-3)

    def test_halves_around_a_jump_of_the_function_until_there_is_nothing_between(self):
        act = parse_activation("(x+sign(x-0.3))*sigmoid(x)")
        assert resolved_grid(act, parse_weight("uniform:-10,10"), 512, 8).size < 512 + 5 + 120

    def test_refuses_in_one_line_what_varies_too_fast(self):
        with pytest.raises(
            FewbitError, match=r"sin\(1000000\*x\) varies too fast to be integrated under uniform:-10,10"
        ):
            problem("sin(1e6*x)", "uniform:-10,10")


class TestRefusal:
    def test_names_the_point_where_the_derivative_is_not_finite(self):
        log = Activation("log", np.log, lambda x: np.where(x > 0, 1 / x, np.nan))
        with pytest.raises(FewbitError, match="derivative of log is not finite at x = -"):
            Moments.of(log, parse_weight("uniform:-1,1"), 16)
        with pytest.raises(FewbitError, match="derivative of log is not finite at x = 0"):
            evaluate_derivative(log, np.array([1.0, 0.0]))

    def test_a_weight_too_narrow_to_hold_mass(self):
        with pytest.raises(FewbitError, match="too narrow for its place"):
            problem("gelu", "uniform:0,5e-324")
