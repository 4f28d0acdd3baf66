"""Weight specs of every kind: a weight whose density integrates to its mass, or one line that says what is accepted."""

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight, solve
from fewbit.fewbit_gen.grid import grid, quadrature
from fewbit.fewbit_gen.weights import Weight, mixture, uniform
from fewbit.tables import FewbitError
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

DIGITS = st.sampled_from("0123456789٣１०")
NUMBERS = st.one_of(
    st.floats().map(repr),
    st.floats(-100, 100).map(lambda x: f"{x:.3g}"),
    st.integers(-12, 12).map(str),
    st.sampled_from(["1e-200", "1e400", "1_0", "１０", "٣", "0x1", "nan", "inf", "-0", "5.", "1e+2", "", "+"]),
    st.text(DIGITS, min_size=1, max_size=4),
)
FAMILIES = st.sampled_from(["uniform", "normal", "laplace", "Uniform", " normal ", "ｕniform", "histogram", "x"])
SINGLE = st.builds(lambda f, a, b: f"{f}:{a},{b}", FAMILIES, NUMBERS, NUMBERS)
MIXED = st.lists(st.builds(lambda s, w: f"{s}*{w}", NUMBERS, SINGLE), min_size=1, max_size=4).map("+".join)
SPECS = st.one_of(SINGLE, MIXED, st.text(max_size=40), st.text("uniformal:,*+-.0123456789e ", max_size=40))


@fuzzed
@given(spec=SPECS)
def test_any_text_is_a_weight_or_refused_in_one_line(spec):
    try:
        weight = parse_weight(spec)
    except FewbitError as error:
        assert "\n" not in str(error)
        return
    assert isinstance(weight, Weight)
    assert spec.strip().isascii()
    assert parse_weight(weight.spec).spec == weight.spec
    low, high = weight.domain
    assert -np.inf < low < high < np.inf
    edges = grid(parse_activation("gelu"), weight, 4096)
    x, dx = quadrature(edges[:-1], edges[1:], 11)
    assert (weight.density(x) * dx).sum() == pytest.approx(weight.mass, rel=1e-4)


@fuzzed
@given(shares=st.lists(st.floats(0, 1e300), min_size=1, max_size=4))
def test_shares_count_or_are_refused(shares):
    parts = [(share, uniform(3 * i, 3 * i + 1)) for i, share in enumerate(shares)]
    try:
        weight = mixture(*parts)
    except FewbitError as error:
        assert "\n" not in str(error)
        assert min(shares) < 1e-100 or max(shares) > 1e100 or min(shares) < 1.1e-15 * sum(shares)
        return
    middles = np.array([3 * i + 0.5 for i in range(len(shares))])
    assert weight.density(middles) == pytest.approx(np.array(shares) / sum(shares), rel=1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        *("uniform:-1０,10", "uniform:-1_0,10", "uniform:٣,10", "normal:0,１", "uniform:nan,1", "uniform:-inf,inf"),
        *("0.5*normal:0,1+０.5*normal:1,1", "0.5*normal:0,1+0_5*normal:1,1", "1e-200*normal:0,1"),
        *("1e-200*normal:0,1+1*normal:3,1", "1e-20*normal:0,1+1*normal:3,1", "1e-400*normal:0,1+1*normal:3,1"),
    ],
)
def test_what_float_would_take_or_lose_is_refused(spec):
    with pytest.raises(FewbitError) as caught:
        solve("gelu", weight=spec)
    assert "\n" not in str(caught.value)
    assert "above 0" not in str(caught.value)
