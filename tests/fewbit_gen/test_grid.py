"""What is steep, narrow, huge or tiny is integrated, or refused in one line: never called exact, or proven."""

from functools import partial
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen import solve as solve_within
from fewbit.fewbit_gen.activations import EXAMPLES
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.grid import features
from fewbit.tables import FewbitError, Table
from scipy.optimize import brentq

solve = partial(solve_within, effort=None)  # the same numbers on a machine with little time


@pytest.mark.sample(1)
@pytest.mark.parametrize("steepness", ["1e2", "1e5", "1e6", "1e7", "1e9"])
def test_a_steep_activation_has_the_error_of_the_gentle_one_scaled(steepness):
    table = solve(f"gelu({steepness}*x)", levels=4, certify=False)
    assert table.levels.size == 4
    # With u = a·x: f' = a·gelu'(u), and dx = du/a. Beyond ±10⁸ a wider line changes nothing.
    wide = min(10 * float(steepness), 1e8)
    gentle = solve("gelu", levels=4, weight=f"uniform:{-wide!r},{wide!r}", certify=False)
    assert table.error == pytest.approx(float(steepness) * gentle.error, rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", ["3.3333", "-7.77777", "1e-3", "9.99"])
@pytest.mark.parametrize("narrowness", ["1e6", "1e10", "1e12"])
def test_a_spike_between_nodes_is_found(at, narrowness):
    table = solve(f"exp(-{narrowness}*(x-{at})**2)", levels=4, certify=False)
    n = float(narrowness) ** 0.5
    ends = (-(10 + float(at)) * n, (10 - float(at)) * n)
    one = solve("gaussian", levels=4, weight=f"uniform:{ends[0]!r},{ends[1]!r}", certify=False)
    assert table.error == pytest.approx(n * one.error, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "text",
    [
        "relu(x)+1e-9*gelu(1e6*(x-3.3333))",
        "relu(x)+1e-7*tanh(1e7*(x-3.3333))",
        "where(x>3.3333,1,0)*x+exp(-1e8*(x+2.71828)**2)/1e4",
    ],
)
def test_what_is_small_beside_a_step_is_found_where_it_is_the_error(text):
    table = solve(text, levels=3, certify=False)
    assert table.error == pytest.approx(quadrature(text, table, centres=(3.3333, -2.71828)), rel=1e-4)
    assert table.error > 0


def quadrature(text, table, centres, span=(-10.0, 10.0)):
    """∫ (f' − q)² on cells that narrow geometrically towards the centres, by Gauss–Legendre of order 40."""
    towards = np.concatenate([[0.0], np.geomspace(1e-14, 20, 400)])
    points = np.concatenate([np.add.outer(centres, s * towards).ravel() for s in (-1, 1)])
    edges = np.unique(np.concatenate([np.clip(points, *span), table.boundaries, np.linspace(*span, 500), [0.0]]))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    half = 0.5 * np.diff(edges)[:, None]
    x = edges[:-1, None] + half * (nodes + 1)
    slope = parse_activation(text).derivative(x)
    level = table(0.5 * (edges[:-1] + edges[1:]))[:, None]
    return float(((slope - level) ** 2 * half * weights).sum())


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [1e-140, 1e-20, 1e-6, 1e6, 1e20, 1e140])
def test_the_scale_of_f_scales_levels_and_error(factor):
    table, one = solve(f"{factor!r}*gelu(x)", levels=4), solve("gelu", levels=4)
    assert table.levels == pytest.approx(factor * one.levels, rel=1e-7)
    assert table.error / factor / factor == pytest.approx(one.error, rel=1e-9)
    assert table.lower_bound / factor / factor == pytest.approx(one.error, rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e300*gelu(x)", "beyond double precision"),
        ("1e200*gelu(x)", "beyond double precision"),
        ("elu(alpha=1e308)", "beyond double precision"),
        ("1e-200*gelu(x)", "below double precision"),
        ("1e-310*gelu(x)", "below double precision"),
        ("sin(1e6*x)", "varies too fast"),
        ("sin(1e9*x)+gelu(x)", "varies too fast"),
        ("1/x", "is not finite at x = 0"),
        ("log(abs(x-3.3333))", "has no bounds near x = 3.3333|not finite|too fast"),
        ("1e17*tanh(x)+gelu(x)-1e17*tanh(x)", "varies too fast|loses its digits"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(text, message):
    with pytest.raises(FewbitError, match=message) as caught:
        solve(text, levels=4, effort=60)
    assert "\n" not in str(caught.value)


def test_a_spike_is_no_step():
    assert not parse_activation("exp(-1e12*(x-3.3333)**2)").step
    assert parse_activation("max(x,0)+min(x,1)").step


@pytest.mark.parametrize("name", EXAMPLES)
def test_turning_points_are_all_there_are(name):
    """Between turning points and kinks f and f' are monotone, or else bounds made of them would be none."""
    activation = parse_activation(name)
    if activation.turns is None and not activation.step and name == "sin":
        return
    found, known = turning_points(activation), np.array([*(activation.turns or ()), *activation.kinks])
    missing = [x for x in found if not np.any(np.abs(known - x) < 1e-6)]
    assert not missing, (
        f"f' of {name} is 0, or turns, at {missing}: turns={tuple(round(float(x), 15) for x in sorted(found))}"
    )
    if "(" in name:  # it takes numbers
        return
    x = np.random.default_rng(0).uniform(-30, 30, 4000)
    low, high = np.sort(np.stack([x, x + np.random.default_rng(1).exponential(0.5, x.size)]), axis=0)
    for text in (f"-({name}(x))", f"{name}(x)*{name}(x)"):
        expression = parse_activation(text)
        least, most = expression.enclosure(low, high, 2.0**-52)
        for share in np.linspace(0, 1, 23):
            at = low + share * (high - low)
            inside = expression.derivative(at)
            out = (inside < least - 1e-300) | (inside > most + 1e-300)  # below, numbers have fewer digits
            assert not out.any(), f"the derivative of {text} at {at[out][0]} is outside of its bounds"


def turning_points(activation):
    """Where f' is 0, and where it turns, within ±30, by changes of sign."""

    def slope(x):
        return activation.derivative(x + 1e-5) - activation.derivative(x - 1e-5)

    x = np.linspace(-30, 30, 60_001) + 1e-4 / 3
    found = []
    for function in (activation.derivative, slope):
        y = function(x)
        changes = (y[:-1] * y[1:] < 0) & (np.minimum(abs(y[:-1]), abs(y[1:])) > 1e-13)
        roots = (brentq(lambda at, f=function: f(np.array([at]))[0], x[i], x[i + 1]) for i in np.flatnonzero(changes))
        found += [root for root in roots if all(abs(root - kink) > 1e-3 for kink in activation.kinks)]
    return found


@pytest.mark.parametrize("name", ["gelu", "tanh", "selu", "hardswish", "softplus"])
def test_a_family_by_name_is_taken_as_it_is(name):
    assert features(parse_activation(name), parse_weight("uniform:-10,10")).edges.size == 0


def test_a_callable_is_looked_at_twice():
    """Its values are all that is known; quadratures of two orders must agree on them."""

    def narrow(x):
        return 1 / (1 + (1e3 * (x - 3.21)) ** 2)

    table = solve(lambda x: x, levels=4, derivative=narrow, certify=False)
    act = parse_activation("arctan(1e3*(x-3.21))/1e3")
    assert table.error == pytest.approx(table_error(table, act, parse_weight("uniform:-10,10")), rel=1e-6)


def test_the_error_agrees_with_forty_digits():
    text, K = "tanh(1e5*(x-1.2345))", 3
    table = solve(text, levels=K, certify=False)
    with mpmath.workdps(40):
        c, a = mpmath.mpf(1.2345), mpmath.mpf("1e5")
        near = [1.2345 + side * 1e-5 * d for side in (-1, 1) for d in range(1, 40, 2)]
        cuts = sorted({-10.0, 10.0, *table.boundaries.tolist(), *near})
        total = mpmath.mpf(0)
        for low, high in pairwise(cuts):
            level = mpmath.mpf(float(table(0.5 * (low + high))))
            total += mpmath.quad(lambda x, y=level: (a * mpmath.sech(a * (x - c)) ** 2 - y) ** 2, [low, high])
    assert table.error == pytest.approx(float(total), rel=1e-6)


def test_an_error_of_no_mass_is_not_stated():
    exact = Table("relu", "shared", "w", [0.0], [0, 1], [0.0, 1.0], 0.0)
    assert table_error(exact, parse_activation("relu"), parse_weight("uniform:-1e8,1e8")) == 0


def test_a_peak_that_is_as_high_as_it_is_narrow():
    """The error is that of an integral by mpmath with 40 digits at the table's own boundaries: f' reaches 6e25."""
    table = solve("1e-13/(x*x+1e-26)", bits=2)
    assert table.error == pytest.approx(7.87633901756e37, rel=1e-9)
    assert 0 <= table.lower_bound <= table.error
