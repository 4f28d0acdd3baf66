import math

import pytest
from fewbit.fewbit_gen import parse_weight
from fewbit.tables.names import counted, find_name, nearest_names, number_text, weight_text
from hypothesis import given
from strategies import finite

KNOWN = ("gelu", "gelu_tanh", "relu", "selu", "sigmoid", "silu", "softplus", "tanh")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *(("gelu", "gelu"), ("GELU", "gelu"), (" SiLU ", "silu"), ("Swish", "silu"), ("logistic", "sigmoid")),
        *(("gelu-tanh", "gelu_tanh"), ("GeluTanh", "gelu_tanh"), ("gelu_new", "gelu_tanh")),
        *(("soft_plus", "softplus"), ("gelou", None), ("", None), ("gelu_", "gelu")),
    ],
)
def test_spellings_reach_one_name(spelling, name):
    assert find_name(spelling, KNOWN) == name


def test_an_alias_of_what_is_not_known_finds_nothing():
    assert find_name("swish", ["gelu"]) is None
    assert nearest_names("swish", ["gelu"]) == []


@pytest.mark.parametrize(
    ("name", "first"), [("gelo", "gelu"), ("swich", "silu"), ("sigmod", "sigmoid"), ("SOFTPLUSS", "softplus")]
)
def test_the_nearest_name_is_told_first(name, first):
    near = nearest_names(name, KNOWN)
    assert near[0] == first
    assert len(near) == len(set(near)) <= 3


@pytest.mark.parametrize("name", ["", "xyzzy", "q" * 10_000])
def test_nothing_is_near_to_nonsense(name):
    assert nearest_names(name, KNOWN) == []


@pytest.mark.parametrize(
    ("value", "text"), [(2, "2"), (-10.0, "-10"), (0.1, "0.1"), (1e-5, "1e-05"), (-0.0, "0"), (1e6, "1000000")]
)
def test_numbers_are_written_short(value, text):
    assert number_text(value) == text


@given(finite)
def test_numbers_read_back_to_the_same_bits(value):
    assert math.copysign(1, float(number_text(value))) == math.copysign(1, value) or value == 0
    assert float(number_text(value)) == value


SPELLINGS = [
    *("uniform:-10.0,1e1", " Uniform : -10 , +10.", "normal:0.0,1", "NORMAL:-.5,2.50e-1", "laplace:-0,1E+1"),
    *("0.70*normal:0,1.0+0.3*laplace:1,2", "1e+5*normal:-1,1 + 2.5e0 * uniform:-1,+.5"),
]


@pytest.mark.parametrize("spec", SPELLINGS)
def test_a_weight_is_spelled_as_the_compiler_spells_it(spec):
    assert weight_text(spec) == parse_weight(spec).spec


def test_a_measured_weight_is_named_by_its_content():
    spec = "histogram:200 bins,0123456789012345"
    assert weight_text(spec) == spec


def test_one_is_no_plural():
    assert [counted(n, "bit") for n in (0, 1, 2)] == ["0 bits", "1 bit", "2 bits"]
