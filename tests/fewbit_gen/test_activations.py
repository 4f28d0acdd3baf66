import math
import re
import warnings
from functools import cache, partial

import mpmath
import numpy as np
import pytest
from fewbit.fewbit_gen import solve
from fewbit.fewbit_gen.activations import FAMILIES, Activation, activation_name, parse_activation
from fewbit.runtime.backends.activation_spec import ROWS
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
    "relu6": lambda x: min(max(x, mp.zero), mp.mpf(6)),
    "squared_relu": lambda x: max(x, mp.zero) ** 2,
    "leaky_relu": lambda x: x if x > 0 else mp.mpf(0.01) * x,
    "leaky_relu(negative_slope=-2)": lambda x: x if x > 0 else -2 * x,
    "hardtanh": lambda x: min(max(x, -mp.one), mp.one),
    "hardtanh(min_val=-0.3,max_val=7)": lambda x: min(max(x, mp.mpf(-0.3)), mp.mpf(7)),
    "hardsigmoid": lambda x: min(max(x + 3, mp.zero), mp.mpf(6)) / 6,
    "hardswish": lambda x: x * min(max(x + 3, mp.zero), mp.mpf(6)) / 6,
    "hardshrink": lambda x: x if abs(x) > 0.5 else mp.zero,
    "softshrink(lambd=0.3)": lambda x: mp.sign(x) * max(abs(x) - mp.mpf(0.3), mp.zero),
    "threshold(threshold=0.1,value=20)": lambda x: x if x > 0.1 else mp.mpf(20),
    "gelu": lambda x: x * mp.ncdf(x),
    "gelu_tanh": gelu_tanh,
    "silu": lambda x: x * sigma(x),
    "silu(beta=-3)": lambda x: x * sigma(-3 * x),
    "quick_gelu": lambda x: x * sigma(mp.mpf(1.702) * x),
    "mish": lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
    "sigmoid": sigma,
    "logsigmoid": lambda x: -mp.log1p(mp.exp(-x)),
    "tanh": mp.tanh,
    "tanhshrink": lambda x: x - mp.tanh(x),
    "softsign": lambda x: x / (1 + abs(x)),
    "elu": lambda x: x if x > 0 else mp.expm1(x),
    "elu(alpha=-2)": lambda x: x if x > 0 else -2 * mp.expm1(x),
    "celu(alpha=3)": lambda x: x if x > 0 else 3 * mp.expm1(x / 3),
    "erf": mp.erf,
    "arctan": mp.atan,
    "sin": mp.sin,
    "gaussian": lambda x: mp.exp(-x * x),
    "selu": lambda x: SCALE * (x if x > 0 else ALPHA * mp.expm1(x)),
    "softplus": lambda x: x if x > 20 else mp.log1p(mp.exp(x)),
    "softplus(beta=2.5,threshold=3)": lambda x: x if 2.5 * x > 3 else mp.log1p(mp.exp(2.5 * x)) / 2.5,
    "softplus(beta=-2)": lambda x: x if -2 * x > 20 else mp.log1p(mp.exp(-2 * x)) / -2,
}
# Dense where f' lives, then both tails until f' is 0 or 1, denormal numbers included.
POINTS = np.unique(
    np.concatenate(
        [np.linspace(-10, 10, 81), np.linspace(-45, 45, 61), [-750, -700, -100, 100, 700, 750], [-1e-8, 1e-8]]
    )
)


@cache
def taylor(name, x):
    """f(x), f'(x) and f''(x) in 40 digits.

    Differenced, and in so many digits that none of these 40 is lost: up to 320 go where 1 + tanh cancels far left,
    80 in the second difference of steps of 10⁻⁴⁰, which is itself 80 digits from the truth.
    """
    with mp.workdps(480):
        h = mp.mpf(10) ** -40
        low, middle, high = (DEFINITIONS[name](mp.mpf(x) + step) for step in (-h, mp.zero, h))
        return middle, (high - low) / (2 * h), (high - 2 * middle + low) / (h * h)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_derivative_is_exact_to_the_rounding_of_its_argument(name):
    """|error| ≤ 8 ε (|f'| + |x f''|): eight last digits of f', or what eight last digits of x make of it.

    That is relative in both tails, and absolute near a root of f', where no program can do better.
    """
    activation = parse_activation(name)
    points = POINTS[~np.isin(POINTS, activation.kinks)]
    for x, value in zip(points.tolist(), activation.derivative(points).tolist(), strict=True):
        _, first, second = taylor(name, x)
        tolerance = 8 * EPS * (abs(first) + abs(x * second)) + (TINY if x else 1e-75)
        assert abs(value - first) <= tolerance, f"{name}'({x}) = {value}, not {mp.nstr(first, 20)}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_function_is_its_definition(name):
    """|error| ≤ 8 ε (|f| + |x f'|), by the same rule."""
    activation = parse_activation(name)
    points = POINTS[~np.isin(POINTS, activation.kinks)]
    for x, value in zip(points.tolist(), activation.function(points).tolist(), strict=True):
        f, first, _ = taylor(name, x)
        tolerance = 8 * EPS * (abs(f) + abs(x * first)) + TINY
        assert abs(value - f) <= tolerance, f"{name}({x}) = {value}, not {mp.nstr(f, 20)}"


# Limits of f' at −∞ and ∞, where they are not 0 and 1.
LIMITS = {
    **dict.fromkeys(("sigmoid", "tanh", "relu6", "hardtanh", "hardsigmoid", "softsign", "erf"), (0, 0)),
    **dict.fromkeys(("arctan", "gaussian", "hardtanh(min_val=-0.3,max_val=7)"), (0, 0)),
    **dict.fromkeys(("hardshrink", "softshrink(lambd=0.3)", "tanhshrink"), (1, 1)),
    **dict.fromkeys(("logsigmoid", "silu(beta=-3)", "softplus(beta=-2)"), (1, 0)),
    "leaky_relu": (0.01, 1),
    "leaky_relu(negative_slope=-2)": (-2, 1),
    "selu": (0, float(SCALE)),
}
RESTLESS = ("sin", "squared_relu")  # f' does not settle
SLOW = ("softsign", "arctan")  # f' settles as a power of x


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name not in RESTLESS])
def test_derivative_is_finite_at_the_ends_of_the_doubles(name):
    far = np.array([-np.inf, -1.7e308, -1e200, 1e200, 1.7e308, np.inf])
    with np.errstate(over="ignore"):  # some multiply x before they cut it
        value = parse_activation(name).derivative(far)
    low, high = LIMITS.get(name, (0, 1))
    assert value.tolist() == [low] * 3 + [high] * 3


@pytest.mark.parametrize("name", DEFINITIONS)
def test_beyond_its_reach_the_derivative_is_constant(name):
    activation = parse_activation(name)
    assert (activation.reach == np.inf) == (name in RESTLESS)
    for side in (-1, 1) if name not in RESTLESS else ():
        x = side * activation.reach * np.geomspace(1 + 1e-9, 1e6, 50)
        value = activation.derivative(x[~np.isin(x, activation.kinks)])
        tolerance = 1e-4 if name in SLOW else 2 * EPS
        assert np.ptp(value) <= tolerance or np.any(np.abs(activation.kinks) > activation.reach)


AS_TORCH = [
    *(name for name in FAMILIES if name not in ("threshold", "silu")),
    *("silu", "softplus(beta=2)", "softplus(threshold=3)", "softplus(beta=-3,threshold=2)"),
    *(f"leaky_relu(negative_slope={slope})" for slope in (0, 1, -2, 0.2)),
    *("elu(alpha=0)", "elu(alpha=2)", "elu(alpha=-0.5)", "celu(alpha=2)", "celu(alpha=0.25)", "celu(alpha=-9)"),
    *("hardtanh(min_val=0,max_val=6)", "hardtanh(min_val=-0.1,max_val=0.3)", "hardtanh(max_val=1e300)"),
    *(f"hardshrink(lambd={lambd})" for lambd in (0, -1, 0.1, 2)),
    *(f"softshrink(lambd={lambd})" for lambd in (0, 0.1, 2)),
    *("threshold(threshold=0.1,value=20)", "threshold(threshold=-3,value=0)"),
]


def torch_function(name):
    """Torch's function of that name, its arguments bound."""
    torch = pytest.importorskip("torch")
    from fewbit.runtime.backends.torch_functions import FORWARDS

    functions = {
        **{row.name: partial(FORWARDS[row.name].call, **dict(row.defaults)) for row in ROWS if row.formula},
        **vars(torch.nn.functional),
        **{name: getattr(torch, name) for name in ("sigmoid", "tanh", "erf", "arctan", "sin")},
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "squared_relu": lambda x: torch.relu(x) ** 2,
        "gaussian": lambda x: torch.exp(-x * x),
    }
    family, _, rest = name.partition("(")
    keywords = eval(f"dict({rest.rstrip(')')})")
    return lambda x: functions[family](x, **keywords)


def torch_error(name):
    """How far torch's own arithmetic is from the truth: its hardsigmoid has 1/6 in single precision."""
    return 5e-9 if name == "hardsigmoid" else 64 * EPS


@pytest.mark.parametrize("name", AS_TORCH)
def test_derivative_is_what_torch_computes(name):
    """At the kinks exactly torch's choice; elsewhere torch's own formulas lose up to a few digits to cancellation."""
    torch = pytest.importorskip("torch")
    activation = parse_activation(name)
    kinks = np.array(activation.kinks)
    beside = [np.nextafter(kinks, side) for side in (-np.inf, np.inf)]
    points = np.concatenate([np.linspace(-12, 12, 241), np.arange(-6, 7) / 2, kinks, *beside])
    x = torch.tensor(points, requires_grad=True)
    torch_function(name)(x).sum().backward()
    expected, found = x.grad.numpy(), activation.derivative(points)
    worst = np.abs(found - expected).argmax()
    said = f"f' of {name} at {points[worst]} is {found[worst]}, torch's {expected[worst]}"
    assert np.abs(found - expected)[worst] <= torch_error(name) * max(1, np.abs(expected).max()), said
    far = np.array([-1e4, -750.0, 750.0, 1e4] if "(" not in name else [])  # a celu of alpha < 0 grows without end
    assert np.isfinite(activation.derivative(far)).all(), f"f' of {name} at {far} is {activation.derivative(far)}"


@pytest.mark.parametrize("name", ["relu", "selu", "softplus", "softplus(threshold=3)", *AS_TORCH])
def test_a_kink_belongs_to_the_piece_on_its_left(name):
    activation = parse_activation(name)
    assert list(activation.kinks) == sorted(set(activation.kinks))
    for kink in activation.kinks:
        left, at, right = activation.derivative(
            np.array([math.nextafter(kink, -math.inf), kink, math.nextafter(kink, math.inf)])
        )
        if kink == 0 and activation.kinks == (-5e-324, 0.0):
            left = at  # f' takes a value at 0 alone
        assert abs(at - left) <= abs(right - at)
        assert abs(at - left) <= 4 * EPS * abs(left)


STEPS = [name for name in AS_TORCH if parse_activation(name).step]


class TestSteps:
    """A derivative that takes few values has a table equal to torch's derivative at every point."""

    def test_are_marked(self):
        families = {name.partition("(")[0] for name in STEPS}
        assert families == {
            *("relu", "relu6", "leaky_relu", "hardtanh", "hardsigmoid", "hardshrink", "softshrink", "threshold", "elu")
        }

    @pytest.mark.parametrize("kind", ["interval", "shared"])
    @pytest.mark.parametrize("name", STEPS)
    def test_their_tables_are_exact_and_as_small_as_they_can_be(self, name, kind):
        torch = pytest.importorskip("torch")
        table = solve(name, bits=2, kind=kind)
        assert table.error == table.lower_bound == 0
        edges = [np.nextafter(table.boundaries, side) for side in (-np.inf, np.inf)]
        points = np.unique(np.concatenate([np.linspace(-9, 9, 181), table.boundaries, *edges, [-1e300, 1e300]]))
        x = torch.tensor(points, requires_grad=True)
        torch_function(name)(x).sum().backward()
        expected = x.grad.numpy()
        assert np.abs(table(points) - expected).max() <= torch_error(name)
        values = len(set(expected.tolist()))
        changes = 1 + np.count_nonzero(np.diff(expected))
        assert table.levels.size == (values if kind == "shared" else changes)
        assert table.codes.size == changes

    def test_one_level_where_the_slopes_are_one(self):
        assert solve("leaky_relu(negative_slope=1)", bits=1).levels.tolist() == [1.0]

    def test_too_few_levels_still_give_a_table(self):
        table = solve("relu6", bits=1, kind="interval")
        assert table.levels.size == 2
        assert table.error > 0


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
            *(("gelu", "gelu"), (" SiLU ", "silu"), ("swish", "silu"), ("gelu()", "gelu")),
            *(("GELU_TANH", "gelu_tanh"), ("Softplus", "softplus"), ("softplus(beta=1)", "softplus")),
            ("softplus(beta=1.0, threshold=20)", "softplus"),
            ("Softplus( threshold = 5, beta = 2.0 )", "softplus(beta=2,threshold=5)"),
            *(("softplus(beta=0.1)", "softplus(beta=0.1)"), ("softplus(beta=-2)", "softplus(beta=-2)")),
            ("softplus(beta=1e-3)", "softplus(beta=0.001)"),
            ("LeakyReLU(negative_slope=0.2)", "leaky_relu(negative_slope=0.2)"),
            *(("leaky_relu(negative_slope=-0.0)", "leaky_relu(negative_slope=0)"), ("LogSigmoid", "logsigmoid")),
            ("Threshold(value=20, threshold=0.1)", "threshold(threshold=0.1,value=20)"),
            *(("swish(beta=2)", "silu(beta=2)"), ("QuickGELU", "quick_gelu"), ("relu2", "squared_relu")),
            ("atan", "arctan"),
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

    @pytest.mark.parametrize("family", [family for family in FAMILIES if family != "threshold"])
    def test_every_family_is_called_by_its_own_name(self, family):
        assert parse_activation(family).name == family == activation_name(family)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("gelou", "unknown activation 'gelou'; nearest: gelu"),
            ("", "unknown activation ''; known: relu, relu6"),
            ("xyzzy(a=1)", "unknown activation 'xyzzy'; known: relu, relu6"),
            ("y*2", "the variable of an expression is x, and 'y.2' has none: write x.2$"),
            ("2*sigmoid(t) + t", r"has none: write 2\*sigmoid\(x\)\+x$"),
            ("relu(y)", r"has none: write relu\(x\)$"),
            ("swish*2", r"has none: write swish\(x\)\*2$"),
            ("a*b", r"has none: write an expression such as x\*sigmoid\(2\*x\)$"),
            ("pi*2", r"has none: write an expression such as x\*sigmoid\(2\*x\)$"),
            ("lambda y: y", "cannot read activation 'lambda y: y'"),
            ("gelu\nrelu", r"unknown activation 'gelu\\nrelu'"),
            ("g" * 100_000, "unknown activation 'ggg"),
            ("gelu(beta=2)", "gelu takes no arguments, not 'beta'"),
            ("softplus(gamma=2)", "softplus takes beta, threshold, not 'gamma'"),
            *(
                (text, "write a name, or a name with keyword numbers")
                for text in (
                    *("softplus(2)", "softplus(beta=1, beta=2)", "softplus(beta=True)", "softplus(beta='2')"),
                    *("softplus(beta=2j)", "softplus(beta=None)", "softplus(beta=float('nan'))"),
                    *("softplus(beta=__import__('os').getpid())", "softplus(**{'beta': 2})", "softplus(*[2])"),
                    *("softplus(beta=2)(1)", "softplus.__call__(beta=2)", "(lambda: 1)()"),
                    *("softplus(softplus(beta=2))", "softplus(beta=2); 1", "softplus("),
                    *("softplus(beta=" + "[" * 150 + "]" * 150 + ")", "softplus(\0)", "softplus(beta='\ud800')"),
                )
            ),
            ("softplus(beta=x)", "cannot take the arguments of 'softplus.beta=x.'"),
            ("(" * 100_000, "at most 1000 characters, not"),
            ("softplus(beta=" + "-" * 100_000 + "1)", "at most 1000 characters, not"),
            ("softplus(beta=" + "1+" * 10_000 + "1)", "at most 1000 characters, not"),
            ("softplus(beta=" + "9" * 5000 + ")", "at most 1000 characters, not"),
            ("softplus(beta=" + "9" * 400 + ")", "beta must be a finite number, not inf"),
            ("softplus(threshold=-1e999)", "threshold must be a finite number, not -inf"),
            ("softplus(beta=0)", "softplus needs a beta other than 0"),
            ("celu(alpha=0)", "celu needs an alpha other than 0"),
            ("hardtanh(min_val=1)", "hardtanh needs min_val < max_val, not 1 and 1"),
            ("softshrink(lambd=-1)", "softshrink needs a lambd of at least 0, not -1"),
            ("threshold", "threshold needs threshold and value: threshold.threshold=…, value=…."),
            ("threshold(value=1)", "threshold needs threshold: "),
        ],
        ids=lambda value: ascii(value)[:40],
    )
    def test_refuses_anything_else_in_one_short_line(self, text, message):
        with pytest.raises(FewbitError, match=message) as caught:
            parse_activation(text)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    @given(st.text())
    def test_any_text_is_an_activation_or_a_refusal(self, text):
        for candidate in (text, f"softplus({text})", f"softplus(beta={text})"):
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")  # Python's own, of odd literals
                    parse_activation(candidate)
            except FewbitError as refusal:
                assert not re.search(r"[\n\r]", str(refusal))
