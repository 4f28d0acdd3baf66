import math

import mpmath
import numpy as np
import pytest
from fewbit.fewbit_gen.weights import parse_weight
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st

number = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("spec", "canonical", "domain"),
    [
        ("uniform:-10,10", "uniform:-10,10", (-10, 10)),
        (" Uniform : -10.0 , 1e1 ", "uniform:-10,10", (-10, 10)),
        ("uniform:-0,0.1", "uniform:0,0.1", (0, 0.1)),
        ("normal:0,1", "normal:0,1", (-12, 12)),
        ("NORMAL:-0.5,2.50", "normal:-0.5,2.5", (-30.5, 29.5)),
    ],
)
def test_reads_and_writes_one_canonical_text(spec, canonical, domain):
    weight = parse_weight(spec)
    assert weight.spec == canonical
    assert weight.domain == domain


@given(number, number)
def test_canonical_text_reads_back_to_the_same_weight(a, b):
    low, high = sorted((a, b))
    if low == high:
        return
    weight = parse_weight(f"uniform:{low!r},{high!r}")
    assert weight.domain == (low, high)
    assert parse_weight(weight.spec).domain == weight.domain
    assert parse_weight(weight.spec).spec == weight.spec


def test_uniform_is_one_as_in_the_papers_table():
    assert parse_weight("uniform:-3,5").density(np.array([-3.0, 0.0, 5.0])).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (-0.5, 2.5), (100, 1e-3), (0, 1e-300)])
def test_normal_is_the_normal_density(mean, deviation):
    x = mean + deviation * np.linspace(-12, 12, 97)
    value = parse_weight(f"normal:{mean!r},{deviation!r}").density(x)
    for at, w in zip(x.tolist(), value.tolist(), strict=True):
        exact = mpmath.npdf(mpmath.mpf(at), mean, mpmath.mpf(deviation))
        # The exponent reaches 72 and so multiplies the rounding of its own argument.
        assert abs(w - exact) <= 2.0**-53 * 300 * exact


def test_normal_leaves_out_no_mass_that_a_double_sees():
    low, high = parse_weight("normal:0,1").domain
    assert math.erfc(high / math.sqrt(2)) < 2.0**-100
    assert low == -high


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "uniform",
        "uniform:",
        "uniform:1",
        "uniform:1,2,3",
        "uniform:a,b",
        "uniform 1,2",
        "cauchy:0,1",
        "uniform:3,1",
        "uniform:1,1",
        "uniform:-0,0",
        "uniform:nan,1",
        "uniform:0,nan",
        "uniform:0,inf",
        "uniform:-inf,0",
        "uniform:0,1e10",
        "normal:0,0",
        "normal:0,-1",
        "normal:nan,1",
        "normal:0,nan",
        "normal:inf,1",
        "normal:0,inf",
        "normal:1e9,1e-12",
        "normal:0,1e-320",
        "u" * 100_000,
        "uniform:0," + "9" * 100_000,
        "uniform:0,\n1\n,2",
    ],
    ids=lambda spec: ascii(spec)[:30],
)
def test_refuses_what_is_no_weight_in_one_line_that_says_what_is(spec):
    with pytest.raises(FewbitError, match=r"weight .*(uniform:A,B|double precision)") as caught:
        parse_weight(spec)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
