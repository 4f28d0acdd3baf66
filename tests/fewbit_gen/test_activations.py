import math
import re
import warnings

import mpmath
import numpy as np
import pytest
from fewbit.fewbit_gen.activations import FAMILIES, Activation, activation_name, parse_activation
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from strategies import finite

EPS = 2.0**-53
TINY = 2.0**-1022  # numbers below it lose digits, and libraries flush them to 0

mp = mpmath.mp.clone()
mp.dps = 40


def sigma(x):
    return 1 / (1 + mp.exp(-x))


def gelu_tanh(x):
    inner = mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3)
    return x * (1 + mp.tanh(inner)) / 2


SCALE = mp.mpf("1.0507009873554804934193349852946")
ALPHA = mp.mpf("1.6732632423543772848170429916717")

# f by its definition, in 40 digits.
DEFINITIONS = {
    "relu": lambda x: max(x, mp.zero),
    "gelu": lambda x: x * mp.ncdf(x),
    "gelu_tanh": gelu_tanh,
    "silu": lambda x: x * sigma(x),
    "sigmoid": sigma,
    "tanh": mp.tanh,
    "selu": lambda x: SCALE * (x if x > 0 else ALPHA * mp.expm1(x)),
    "softplus": lambda x: x if x > 20 else mp.log1p(mp.exp(x)),
    "softplus(beta=2.5,threshold=3)": lambda x: x if 2.5 * x > 3 else mp.log1p(mp.exp(2.5 * x)) / 2.5,
    "softplus(beta=-2)": lambda x: x if -2 * x > 20 else mp.log1p(mp.exp(-2 * x)) / -2,
}
# Dense where f' lives, then both tails until f' is 0 or 1, denormal numbers included.
POINTS = np.unique(
    np.concatenate(
        [np.linspace(-10, 10, 161), np.linspace(-45, 45, 91), [-750, -700, -100, 100, 700, 750], [-1e-8, 1e-8]]
    )
)


def taylor(f, x):
    """f(x), f'(x) and f''(x) in 40 digits.

    Differenced, and in so many digits that none of these 40 is lost: up to 320 go where 1 + tanh cancels far left,
    80 in the second difference of steps of 10⁻⁴⁰.
    """
    with mp.workdps(480):
        h = mp.mpf(10) ** -40
        low, middle, high = (f(mp.mpf(x) + step) for step in (-h, mp.zero, h))
        return middle, (high - low) / (2 * h), (high - 2 * middle + low) / (h * h)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_derivative_is_exact_to_the_rounding_of_its_argument(name):
    """|error| ≤ 8 ε (|f'| + |x f''|): eight last digits of f', or what eight last digits of x make of it.

    That is relative in both tails, and absolute near a root of f', where no program can do better.
    """
    activation = parse_activation(name)
    points = POINTS[~np.isin(POINTS, activation.kinks)]
    for x, value in zip(points.tolist(), activation.derivative(points).tolist(), strict=True):
        _, first, second = taylor(DEFINITIONS[name], x)
        tolerance = 8 * EPS * (abs(first) + abs(x * second)) + TINY
        assert abs(value - first) <= tolerance, f"{name}'({x}) = {value}, not {mp.nstr(first, 20)}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_function_is_its_definition(name):
    """|error| ≤ 8 ε (|f| + |x f'|), by the same rule."""
    activation = parse_activation(name)
    points = POINTS[~np.isin(POINTS, activation.kinks)]
    for x, value in zip(points.tolist(), activation.function(points).tolist(), strict=True):
        f, first, _ = taylor(DEFINITIONS[name], x)
        tolerance = 8 * EPS * (abs(f) + abs(x * first)) + TINY
        assert abs(value - f) <= tolerance, f"{name}({x}) = {value}, not {mp.nstr(f, 20)}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_derivative_is_finite_at_the_ends_of_the_doubles(name):
    far = np.array([-np.inf, -1.7e308, -1e200, 1e200, 1.7e308, np.inf])
    with np.errstate(over="ignore"):  # softplus multiplies by beta
        value = parse_activation(name).derivative(far)
    falling = name == "softplus(beta=-2)"
    low, high = (value[3:], value[:3]) if falling else (value[:3], value[3:])
    assert low.tolist() == [0.0] * 3
    top = {"sigmoid": 0.0, "tanh": 0.0, "selu": float(SCALE)}.get(name, 1.0)
    assert high.tolist() == [top] * 3


@pytest.mark.parametrize("name", DEFINITIONS)
def test_beyond_its_reach_the_derivative_is_constant(name):
    activation = parse_activation(name)
    for side in (-1, 1):
        x = side * activation.reach * np.geomspace(1, 1e6, 50)
        value = activation.derivative(x[~np.isin(x, activation.kinks)])
        assert np.ptp(value) <= 2 * EPS or np.any(np.abs(activation.kinks) > activation.reach)


@pytest.mark.parametrize(
    "name", [*FAMILIES, "softplus(beta=2)", "softplus(threshold=3)", "softplus(beta=-3,threshold=2)"]
)
def test_derivative_is_what_torch_computes(name):
    """At the kinks exactly torch's choice; elsewhere torch's own formulas lose up to a few digits to cancellation."""
    torch = pytest.importorskip("torch")
    functions = {**vars(torch.nn.functional), "sigmoid": torch.sigmoid, "tanh": torch.tanh}
    family, _, rest = name.partition("(")
    keywords = eval(f"dict({rest.rstrip(')')})")
    if family == "gelu_tanh":
        family, keywords = "gelu", {"approximate": "tanh"}
    activation = parse_activation(name)
    kinks = np.array(activation.kinks)
    points = np.concatenate([np.linspace(-12, 12, 241), kinks])
    x = torch.tensor(points, requires_grad=True)
    functions[family](x, **keywords).sum().backward()
    assert np.abs(activation.derivative(points) - x.grad.numpy()).max() <= 64 * EPS


@pytest.mark.parametrize("name", ["relu", "selu", "softplus", "softplus(threshold=3)", "softplus(beta=7,threshold=2)"])
def test_a_kink_belongs_to_the_piece_on_its_left(name):
    activation = parse_activation(name)
    for kink in activation.kinks:
        left, at, right = activation.derivative(
            np.array([math.nextafter(kink, -math.inf), kink, math.nextafter(kink, math.inf)])
        )
        assert abs(at - left) <= abs(right - at)
        assert abs(at - left) <= 4 * EPS * abs(left)


@given(
    st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3),
    st.floats(1e-3, 1e2) | st.floats(-1e2, -1e-3),
)
def test_softplus_kink_is_the_last_double_of_its_left_piece(beta, threshold):
    """Whatever the rounding of beta·x, one table interval ends exactly where torch's condition changes."""
    (kink,) = parse_activation(f"softplus(beta={beta!r},threshold={threshold!r})").kinks
    after = math.nextafter(kink, math.inf)
    assert (beta * kink > threshold) == (beta < 0)
    assert (beta * after > threshold) == (beta > 0)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("gelu", "gelu"),
            (" SiLU ", "silu"),
            ("swish", "silu"),
            ("gelu()", "gelu"),
            ("GELU_TANH", "gelu_tanh"),
            ("Softplus", "softplus"),
            ("softplus(beta=1)", "softplus"),
            ("softplus(beta=1.0, threshold=20)", "softplus"),
            ("Softplus( threshold = 5, beta = 2.0 )", "softplus(beta=2,threshold=5)"),
            ("softplus(beta=0.1)", "softplus(beta=0.1)"),
            ("softplus(beta=-2)", "softplus(beta=-2)"),
            ("softplus(beta=1e-3)", "softplus(beta=0.001)"),
        ],
    )
    def test_reads_the_spellings_people_use(self, text, name):
        activation = parse_activation(text)
        assert isinstance(activation, Activation)
        assert activation.name == name
        assert parse_activation(activation.name).name == name

    @given(finite.filter(bool), finite)
    def test_name_reads_back_to_the_same_numbers(self, beta, threshold):
        name = activation_name("softplus", beta=beta, threshold=threshold)
        with np.errstate(over="ignore"):
            assert parse_activation(name).name == name

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_is_called_by_its_own_name(self, family):
        assert parse_activation(family).name == family == activation_name(family)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("gelou", "unknown activation 'gelou'; nearest: gelu"),
            ("", "unknown activation ''; known: relu, gelu"),
            ("xyzzy(a=1)", "unknown activation 'xyzzy'; known: relu, gelu"),
            ("lambda x: x", "unknown activation 'lambda x: x'"),
            ("gelu\nrelu", r"unknown activation 'gelu\\nrelu'"),
            ("g" * 100_000, "unknown activation 'ggg"),
            ("gelu(beta=2)", "gelu takes no arguments, not 'beta'"),
            ("softplus(gamma=2)", "softplus takes beta, threshold, not 'gamma'"),
            ("softplus(2)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=1, beta=2)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=True)", "write a name, or a name with keyword numbers"),
            ("softplus(beta='2')", "write a name, or a name with keyword numbers"),
            ("softplus(beta=2j)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=None)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=x)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=float('nan'))", "write a name, or a name with keyword numbers"),
            ("softplus(beta=__import__('os').getpid())", "write a name, or a name with keyword numbers"),
            ("softplus(**{'beta': 2})", "write a name, or a name with keyword numbers"),
            ("softplus(*[2])", "write a name, or a name with keyword numbers"),
            ("softplus(beta=2)(1)", "write a name, or a name with keyword numbers"),
            ("softplus.__call__(beta=2)", "write a name, or a name with keyword numbers"),
            ("(lambda: 1)()", "write a name, or a name with keyword numbers"),
            ("softplus(softplus(beta=2))", "write a name, or a name with keyword numbers"),
            ("softplus(beta=2); 1", "write a name, or a name with keyword numbers"),
            ("softplus(", "write a name, or a name with keyword numbers"),
            ("(" * 100_000, "write a name, or a name with keyword numbers"),
            ("softplus(beta=" + "-" * 100_000 + "1)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=" + "1+" * 10_000 + "1)", "write a name, or a name with keyword numbers"),
            ("softplus(beta=" + "[" * 150 + "]" * 150 + ")", "write a name, or a name with keyword numbers"),
            ("softplus(beta=" + "9" * 5000 + ")", "write a name, or a name with keyword numbers"),
            ("softplus(\0)", "write a name, or a name with keyword numbers"),
            ("softplus(beta='\ud800')", "write a name, or a name with keyword numbers"),
            ("softplus(beta=" + "9" * 400 + ")", "beta must be a finite number, not inf"),
            ("softplus(threshold=-1e999)", "threshold must be a finite number, not -inf"),
            ("softplus(beta=0)", "softplus needs a beta other than 0"),
        ],
        ids=lambda value: ascii(value)[:40],
    )
    def test_refuses_anything_else_in_one_short_line(self, text, message):
        with pytest.raises(FewbitError, match=message) as caught:
            parse_activation(text)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250

    @given(st.text())
    def test_any_text_is_an_activation_or_a_refusal(self, text):
        for candidate in (text, f"softplus({text})", f"softplus(beta={text})"):
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")  # Python's own, of odd literals
                    parse_activation(candidate)
            except FewbitError as refusal:
                assert not re.search(r"[\n\r]", str(refusal))
