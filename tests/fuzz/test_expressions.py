"""Expressions of every kind under weights of every kind: a table whose error holds, or one line that says why not.

The error is integrated again on nodes that the solver has none of, cut finely towards every point at which something
may happen; time is counted by looks at the clock, not by the clock.
"""

import itertools

import numpy as np
import pytest
from fewbit.fewbit_gen import effort, parse_activation, parse_weight, solve
from fewbit.tables import FewbitError
from fuzzing import fuzzed
from hypothesis import assume, given
from hypothesis import strategies as st

pytestmark = pytest.mark.deep

UNARY = (
    *("gelu", "silu", "tanh", "sigmoid", "relu", "softplus", "elu", "selu", "mish", "exp", "erf", "gaussian", "sin"),
    *("cos", "abs", "sign", "sqrt", "log1p", "log", "tan", "sinh", "cosh", "arctan", "hardtanh", "relu6", "softsign"),
    *("expm1", "hardswish"),
)
PLAIN = st.floats(-5, 5).map(lambda x: f"{x:.3g}")
SCALES = st.sampled_from(["1e-300", "1e-9", "1e-3", "7", "1e3", "1e5", "1e7", "1e12", "1e300"])
NUMBERS = st.one_of(PLAIN, PLAIN, SCALES)
LEAVES = st.one_of(st.just("x"), st.just("x"), NUMBERS.map(lambda n: f"({n})"))


def _larger(inner):
    return st.one_of(
        st.builds(lambda f, u: f"{f}({u})", st.sampled_from(UNARY), inner),
        st.builds(lambda u, op, v: f"({u}{op}{v})", inner, st.sampled_from("+-*/"), inner),
        st.builds(lambda n, c, u: f"({n}*({u}-({c})))", NUMBERS, PLAIN, inner),
        st.builds(lambda u, n: f"({u})**{n}", inner, st.sampled_from(["2", "3", "-1", "0.5", "-2", "1.5"])),
        st.builds(lambda f, u, v: f"{f}({u},{v})", st.sampled_from(["max", "min"]), inner, inner),
        st.builds(lambda u, v, w: f"where({u}>{v},{w},x)", inner, inner, inner),
    )


EXPRESSIONS = st.recursive(LEAVES, _larger, max_leaves=6)
HOSTILE = st.one_of(st.text(max_size=30), st.text("x()+-*/.,0123456789eginhatsux<>= _[]{}'\"", max_size=40))
WEIGHTS = st.one_of(
    st.just("uniform:-10,10"),
    st.builds(lambda a, w: f"uniform:{a!r},{a + w!r}", st.floats(-9, 9), st.sampled_from([1e-9, 1e-3, 0.5, 7, 1e4])),
    st.builds(lambda a, s: f"normal:{a:.3g},{s}", st.floats(-5, 5), st.sampled_from([1e-6, 0.01, 1, 30])),
    st.builds(
        lambda a, b: f"0.3*normal:{a:.3g},1e-3+0.7*uniform:{b:.3g},{b + 3:.3g}", st.floats(-5, 5), st.floats(-5, 5)
    ),
    st.just("uniform:-1e8,1e8"),
)


def integrated(table, activation, weight, order=13):
    """∫ (f' − q)² w, by a Gauss–Legendre of another order on other panels, and the rounding to be allowed for.

    Panels narrow towards boundaries and kinks, where what is steep was found (a table has boundaries there), and
    towards 0, where it is of most functions.
    """
    low, high = weight.domain
    fixed = np.array([low, high, 0.0, *table.boundaries, *activation.kinks, *weight.breakpoints])
    fixed = np.unique(np.clip(fixed, low, high))
    some = fixed[:: -(-len(fixed) // 300)]  # of more, panels end at each, and narrow towards some
    towards = np.geomspace(1e-24, 1, 96) * (high - low)  # from below a double's spacing at 1e-8 of the width
    cuts = np.concatenate([np.add.outer(some, towards).ravel(), np.add.outer(some, -towards).ravel()])
    even = np.linspace(low, high, 7919)
    edges = np.unique(np.concatenate([fixed, np.clip(cuts, low, high), even]))
    left, right = edges[:-1], edges[1:]
    wide = right - left > 64 * np.spacing(np.maximum(np.abs(left), np.abs(right)))  # else nodes round to either end
    left, right = left[wide], right[wide]
    nodes, weights = np.polynomial.legendre.leggauss(order)
    half = 0.5 * (right - left)[:, None]
    x = left[:, None] + half * (nodes + 1)
    with np.errstate(all="ignore"):
        slope = activation.derivative(x)
        panels = (slope - table(0.5 * (left + right))[:, None]) ** 2 * weight.density(x) * half * weights
        size = float((slope**2 * weight.density(x) * half * weights).sum())
    return float(panels.sum()), 1e-11 * size


@pytest.mark.deep
@fuzzed
@given(
    text=EXPRESSIONS, spec=WEIGHTS, K=st.sampled_from([2, 3, 8]), kind=st.sampled_from(["shared", "interval"]),
    looks=st.sampled_from([20, 60, 200]),
)  # fmt: skip
def test_a_table_states_what_holds_or_there_is_none(text, spec, K, kind, looks):
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effort.time, "monotonic", lambda: float(next(ticks)))
        try:
            table = solve(text, levels=K, kind=kind, weight=spec, effort=looks)
        except FewbitError as error:
            assert "\n" not in str(error)
            table = None
    # The first call of each kernel gives a tick back, and what must be finished for the result to be true is.
    assert next(ticks) <= looks + 500
    assume(table is not None)
    assert 0 <= table.lower_bound <= table.error
    assert np.isfinite(table.levels).all()
    activation, weight = parse_activation(text), parse_weight(spec)
    error, rounding = integrated(table, activation, weight)
    assume(np.isfinite(error))
    assert table.error == pytest.approx(error, rel=1e-3, abs=max(rounding, 1e-300))


@fuzzed
@given(text=HOSTILE)
def test_hostile_text_is_an_activation_or_refused_in_one_line(text):
    try:
        activation = parse_activation(text)
    except FewbitError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
        return
    assert parse_activation(activation.name).name == activation.name


@fuzzed
@given(text=EXPRESSIONS, low=st.floats(-20, 20), width=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 100.0]))
def test_bounds_hold_every_value_between(text, low, width):
    try:
        activation = parse_activation(text)
    except FewbitError:
        return
    if activation.enclosure is None:
        return
    x = np.linspace(low, low + width, 50)
    least, most = activation.enclosure(np.array([low]), np.array([low + width]), 2.0**-52)
    with np.errstate(all="ignore"):
        slope = activation.derivative(x)
    known = np.isfinite(slope)
    assert np.all(slope[known] >= least) and np.all(slope[known] <= most)
