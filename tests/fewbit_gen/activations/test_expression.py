import re

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, solve
from fewbit.fewbit_gen.activations import FAMILIES
from fewbit.fewbit_gen.activations.elementary import ELEMENTARY
from fewbit.tables import FewbitError
from hypothesis import given, settings
from hypothesis import strategies as st

EPS = 2.0**-53
SMALLEST = 5e-324
X = np.linspace(-10, 10, 2001)


def torch_derivative(text, x):
    """What torch's autograd makes of the same text."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    names = {
        **{name: getattr(F, name) for name in FAMILIES if hasattr(F, name)},
        **{
            name: getattr(torch, name) for name in (*ELEMENTARY, "erf", "arctan", "sin", "tanh") if hasattr(torch, name)
        },
        "pi": np.pi,
        "e": np.e,
        "max": torch.maximum,
        "min": torch.minimum,
        "clip": torch.clamp,
        "where": lambda c, a, b: torch.where(c, a + 0 * names["x"], b + 0 * names["x"]),
    }
    names["x"] = torch.tensor(x, requires_grad=True)
    eval(text, {"__builtins__": {}}, names).sum().backward()
    return names["x"].grad.numpy()


class TestDerivative:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("text", "family"),
        [
            *(("x*sigmoid(x)", "silu"), ("x*sigmoid(1.702*x)", "quick_gelu"), ("x*sigmoid(-3*x)", "silu(beta=-3)")),
            *(("1/(1+exp(-x))", "sigmoid"), ("x*erfc(-x/sqrt(2))/2", "gelu")),
            *(("x*(1+tanh(sqrt(2/pi)*(x+0.044715*x**3)))/2", "gelu_tanh"), ("x*tanh(log1p(exp(x)))", "mish")),
            *(("-log1p(exp(-x))", "logsigmoid"), ("x-tanh(x)", "tanhshrink"), ("x/(1+abs(x))", "softsign")),
            *(("where(x>0, x, 2*expm1(x))", "elu(alpha=2)"), ("max(x, 0)", "relu"), ("clip(x, -1, 1)", "hardtanh")),
            *(("where(abs(x)>0.5, x, 0)", "hardshrink"), ("sign(x)*relu(abs(x)-0.5)", "softshrink")),
            *(("x*min(max(x+3,0),6)/6", "hardswish"), ("relu(x)**2", "squared_relu"), ("e**-(x**2)", "gaussian")),
            ("(exp(x)-exp(-x))/(exp(x)+exp(-x))", "tanh"),
        ],
    )
    def test_is_that_of_the_same_function_by_name(self, text, family):
        expression, named = parse_activation(text), parse_activation(family)
        x = np.setdiff1d(X, [*expression.kinks, *named.kinks, *np.nextafter(named.kinks, np.inf)])
        assert expression.derivative(x) == pytest.approx(named.derivative(x), rel=1e-13, abs=1e-15)
        assert expression.function(x) == pytest.approx(named.function(x), rel=1e-13, abs=1e-15)
        assert expression.step == named.step
        # As good as the other, and by the same solver: tables differ where the formulas round differently.
        assert solve(text, bits=2).error == pytest.approx(solve(family, bits=2).error, rel=1e-9, abs=1e-20)

    @pytest.mark.parametrize("name", [name for name in FAMILIES if name != "threshold"])
    def test_of_a_family_in_an_expression_is_the_familys(self, name):
        expression, named = parse_activation(f"{name}(x)"), parse_activation(name)
        assert expression.derivative(X).tolist() == named.derivative(X).tolist()
        assert [k for k in expression.kinks if abs(k) < 1000] == list(named.kinks)
        assert expression.step == named.step

    def test_keeps_its_digits_in_both_tails(self):
        x = np.array([-700.0, -300.0, -40.0, 40.0, 300.0, 700.0])
        tail = np.exp(-np.abs(x))
        for text, expected in {
            "sigmoid(x)": tail,
            "tanh(x/2)": 2 * tail,
            "softplus(x)": np.where(x < 0, tail, 1.0),
        }.items():
            assert parse_activation(text).derivative(x) == pytest.approx(expected, rel=1e-12, abs=0)

    @pytest.mark.sample(11)
    @pytest.mark.parametrize(
        "text",
        [
            *(f"{name}(0.5+0.01*x)" for name in ELEMENTARY),
            *("2**x", "x**3", "x**-2", "(x**2+1)**0.5", "pi*x+e", "+x-(-x)", "1/(1+x**2)", "x/(2+sin(x))"),
            *(
                "max(x, sin(x))",
                "min(x*x, 2*x)",
                "where(x>1, x*x, -x)",
                "where(-1<x, 3, 2)*x",
                "clip(x, -1.005, 2.005)",
            ),
            *("sqrt(relu(x)+1)", "exp(-x**2)*cos(3*x)", "leaky_relu(x-1, negative_slope=0.2)", "mish(x)*silu(x)"),
        ],
    )
    def test_is_torchs(self, text):
        x = X + 0.00371
        expected = torch_derivative(text, x)
        assert parse_activation(text).derivative(x) == pytest.approx(expected, rel=1e-12, abs=1e-14)

    def test_of_a_constant_is_zero_and_where_the_inside_rests_the_outside_rests(self):
        assert parse_activation("0*x+3").derivative(X).tolist() == [0.0] * X.size
        assert parse_activation("x**0").derivative(X).tolist() == [0.0] * X.size
        derivative = parse_activation("sqrt(relu(x))").derivative
        assert derivative(np.array([-1.0, 4.0])).tolist() == [0.0, 0.25]

    def test_is_no_number_where_the_function_is_none(self):
        assert np.isnan(parse_activation("log(x)").derivative(np.array([-1.0])))
        for text in ("log(x)", "sqrt(x)", "1/x", "x**0.5", "arctan(1/(x-1))*log(x+1)"):
            with pytest.raises(FewbitError, match=r"the derivative of .* is not finite at x = "):
                solve(text)

    def test_keeps_the_shape_of_its_argument(self):
        x = X[:12].reshape(3, 4)
        for text in ("x", "x*0+1", "where(x>0,1,2)*x", "gelu(x)"):
            activation = parse_activation(text)
            assert activation.derivative(x).shape == activation.function(x).shape == (3, 4)


class TestKinks:
    @pytest.mark.parametrize(
        ("text", "kinks"),
        [
            ("x", []),
            ("tanh(x)*x", []),
            ("abs(x)", [0]),
            ("abs(-x)", [-SMALLEST]),  # f'(0) is then the value from the right: −abs' = 1
            ("abs(x-pi)", [np.pi]),
            ("relu(x-1)-relu(-x-1)", [np.nextafter(-1, -2), 1]),
            ("relu(relu(x))", [0]),
            ("where(x<0,0.1*x,x)", [-SMALLEST]),
            ("where(x<=0,0.1*x,x)", [0]),
            ("where(-1<x<=2,x,0)", [-1, 2]),
            ("where(x>0,relu(x-1),relu(-x-1))", [np.nextafter(-1, -2), 0, 1]),
            ("clip(x,0,6)", [0, 6]),
            ("max(x,-x)", [0]),
            ("abs(x**2-2)", [-np.sqrt(2), np.sqrt(2)]),
            ("abs(x**3-1000)", [10]),
            ("relu(1e6*(x-1e6))", [1e6]),
            ("softplus(x)", [20]),
            ("relu6(x)", [0, np.nextafter(6, 0)]),
            ("max(x,sign(x))", [-1, 0, 1]),
        ],
    )
    def test_are_found_to_the_last_bits(self, text, kinks):
        found = parse_activation(text).kinks
        assert np.array(found) == pytest.approx(kinks, rel=4 * EPS, abs=0)

    @pytest.mark.parametrize("text", ["abs(x)", "abs(-x)", "where(x<3,x,0)", "relu(x/3-1)", "clip(-x,-0.3,1.7)"])
    def test_belong_to_the_piece_on_their_left(self, text):
        activation = parse_activation(text)
        for kink in activation.kinks:
            before, at, after = activation.derivative(np.array([np.nextafter(kink, -9), kink, np.nextafter(kink, 99)]))
            assert before == at != after

    def test_of_a_function_that_bends_for_ever_are_those_nearest_to_0(self):
        kinks = np.array(parse_activation("abs(sin(x))").kinks)
        inside = kinks[np.abs(kinks) < 100]
        assert inside == pytest.approx(np.pi * np.arange(-31, 32), abs=1e-12)
        assert solve("abs(sin(x))", bits=2).error > 0

    @pytest.mark.parametrize(
        ("text", "levels"),
        [
            *(("relu(x)", 2), ("abs(x)", 2), ("x*sign(x)", 2), ("clip(x,0,6)", 2), ("max(x,-1,2*x-3)", 3)),
            *(("where(x>1,3*x,x/7)", 2), ("x", 1)),
        ],
    )
    @pytest.mark.parametrize("kind", ["shared", "interval"])
    def test_steps_get_their_exact_table(self, text, levels, kind):
        table = solve(text, bits=2, kind=kind)
        assert table.error == table.lower_bound == 0
        assert kind == "interval" or table.levels.size == levels
        derivative = parse_activation(text).derivative
        x = np.concatenate([X, table.boundaries, np.nextafter(table.boundaries, np.inf)])
        assert table(x).tolist() == derivative(x).tolist()


class TestReach:
    @pytest.mark.parametrize(
        ("text", "low", "high"),
        [
            *(("gelu(x)", 8, 9), ("gelu(x/10)", 80, 90), ("x*sigmoid(2*x)", 18, 21), ("relu(x-7)", 7, 7.02)),
            *(("x", 1, 1), ("arctan(x)", 90, 110), ("x**2", np.inf, np.inf), ("sin(x)", np.inf, np.inf)),
            ("exp(x)", np.inf, np.inf),
        ],
    )
    def test_is_where_the_derivative_comes_to_rest(self, text, low, high):
        assert low <= parse_activation(text).reach <= high

    def test_makes_wide_weights_as_good_as_for_a_name(self):
        wide = "uniform:-1e6,1e6"
        assert solve("x*sigmoid(x)", bits=2, weight=wide).error == pytest.approx(
            solve("silu", bits=2, weight=wide).error, rel=1e-3
        )


class TestName:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            *((" x * sigmoid( 1.7020*x ) ", "x*sigmoid(1.702*x)"), ("x**2.0", "x**2"), ("((x))", "x")),
            *(("1e-5*x", "1e-05*x"), ("swish(x)+ReLU(x)", "silu(x)+relu(x)")),
            *(("Softplus(x, beta = 2.0)", "softplus(x,beta=2)"), ("where(0<x<=1, x, 0)", "where(0<x<=1,x,0)")),
            *(("maximum(x, absolute(x))", "max(x,abs(x))"), ("(x+1)*x", "(x+1)*x")),
        ],
    )
    def test_is_its_canonical_text(self, text, name):
        activation = parse_activation(text)
        assert activation.name == name
        assert parse_activation(name).name == name
        assert solve(text, bits=1).activation == name


HOSTILE = [
    ("x.__class__", "cannot take 'x.__class__'"),
    ("x.real*2", "cannot take 'x.real'"),
    *(
        (text, "cannot take")
        for text in (
            *("().__class__.__bases__[0].__subclasses__()[0](x)", "x.__class__(x)", "__import__('os').system('x')*x"),
            *("sigmoid(x)(x)", "x*...", "x*'a'", "x*b'a'", "f'{x}'", "(lambda x: x)(x)", "(y:=x)", "[x for x in [1]]"),
            *("{x: 1}", "(x, x)", "[x]", "x[0]", "x and x", "not x", "~x", "x // 2", "x % 2", "x @ x", "x << 2"),
            *("x ^ 2", "(yield x)", "(await x)"),
        )
    ),
    ("__import__(x)", "unknown function '__import__'"),
    ("eval(x)", "unknown function 'eval'"),
    ("open(x)", "unknown function 'open'"),
    ("print(x)", "unknown function 'print'"),
    ("x*foo(x)", "unknown function 'foo' in the expression; known: exp, .* all activations by name"),
    ("sigmod(x)", "unknown function 'sigmod' in the expression; nearest: sigmoid"),
    ("x(x)", "unknown function 'x'"),
    ("pi(x)", "unknown function 'pi'"),
    ("x*y", "unknown name 'y' in the expression; it has x, pi, e"),
    ("x*inf", "unknown name 'inf'"),
    ("x*True", "cannot take 'True'"),
    ("x*None", "cannot take 'None'"),
    ("x*2j", "cannot take '2j'"),
    ("lambda: x", "cannot take 'lambda: x'"),
    ("sum(x for _ in x)", "unknown function 'sum'"),
    ("x if x > 0 else 0", "cannot take .*where"),
    ("x > 0", "cannot take 'x > 0'"),
    ("abs(*x)", "takes its arguments one by one"),
    ("abs(**x)", "cannot take the arguments"),
    ("relu(**{'x': x})", "cannot take the arguments"),
    ("abs(x, x)", "abs takes one argument"),
    ("gelu(x, 2)", "gelu takes one argument"),
    ("exp(x, base=2)", "cannot take the arguments"),
    ("gelu(x, beta=2)", "activation gelu takes no arguments, not 'beta'"),
    ("softplus(x, beta=x)", "cannot take the arguments"),
    ("softplus(x, beta=0)", "softplus needs a beta other than 0"),
    ("max(x)", "max takes two arguments or more"),
    ("min(x, key=x)", "min takes two arguments or more"),
    ("clip(x, 1)", "clip takes three arguments"),
    ("where(x, 1, 2)", "a condition is a comparison by < <= > >=, not 'x'"),
    ("where(x == 0, 1, 2)", "a condition is a comparison"),
    ("where(x is 0, 1, 2)", "a condition is a comparison"),
    ("where(x > 0, 1)", "where takes three arguments"),
    ("x**x", "of the two one must be a number"),
    ("x*9**9**9**9", r"'9 \*\* 9 \*\* 9' in the expression is not a finite number"),
    ("x**9**9**9**9", "is not a finite number"),
    ("x*1e999", "is not a finite number"),
    ("x*" + "9" * 400, "is not a finite number"),
    ("x/0*(1/0)", "'1 / 0' in the expression is not a finite number"),
    ("log(-1)*x", "'log.-1.' in the expression is not a finite number"),
    ("-" * 900 + "x", "nested 60 deep"),
    ("(" * 150 + "x" + "+1)" * 150, "nested 60 deep"),
    ("sin(" * 100 + "x" + ")" * 100, "nested 60 deep"),
    ("+".join("x" * 400), "nested 60 deep"),
    ("+".join(["x"] * 5000), "at most 1000 characters, not 9999"),
    ("x+" + "(" * 100_000, "at most 1000 characters"),
    *(
        (text, "cannot read activation")
        for text in (
            *("x*\N{MATHEMATICAL ITALIC SMALL X}", "ｅｘｅｃ(x)", "x*\N{ZERO WIDTH SPACE}x", "x\0", "x; x", "x = 1"),
            *("x +", "x-", "(x"),
        )
    ),
    ("x²", "unknown activation"),
    ("x\nx", "unknown activation"),
    ("import x", "unknown activation"),
    ("x**", r"cannot read activation 'x\*\*'; write a name, "),
]


class TestRefusals:
    @pytest.mark.parametrize(("text", "message"), HOSTILE, ids=lambda value: ascii(value)[:40])
    def test_say_what_is_wrong_in_one_line(self, text, message):
        with pytest.raises(FewbitError, match=message) as caught:
            parse_activation(text)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500

    @settings(max_examples=60)
    @given(st.text(alphabet="x019.+-*/()<>,= esinwhrabgclup", max_size=30) | st.text(max_size=10).map("x*{}".format))
    def test_any_text_is_an_activation_or_a_refusal(self, text):
        try:
            activation = parse_activation(text)
        except FewbitError as refusal:
            assert not re.search(r"[\n\r]", str(refusal))
        else:
            assert parse_activation(activation.name).name == activation.name
            assert activation.derivative(X[:5]).shape == (5,)
