"""torch computes what the compiler reads: every function, every operation, every dtype."""

import fewbit
import numpy as np
import pytest
import torch
from fewbit.fewbit_gen.activations import parse_activation
from fewbit.fewbit_gen.activations.elementary import ELEMENTARY
from fewbit.fewbit_gen.activations.registry import FAMILIES
from fewbit.runtime.backends.expressions import canonical_text, expression_function
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import DTYPES, HALVES, SETTLED, assert_same_bits, laid_out
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

NEEDED = {"threshold": ",threshold=0.5,value=2"}
EXPRESSIONS = [
    *("x*sigmoid(1.702*x)", "x", "+x", "-x/3", "2**x", "x**2", "(1+abs(x))**-0.5", "sqrt(2/pi)*x+e-exp(1)"),
    *("where(x>0,1,2)", "where(0.5 >= x > -1, x, -x)", "where(x<=sin(x),1/4,x)", "max(x,0.1*x,-3)", "min(3,x)"),
    *("max(1,x,2)", "clip(x,-1,2)", "clip(x,x/2,cosh(x))", "silu(x,beta=2)", "Softplus(x,beta=2,threshold=3)"),
    *("maximum(x,-x)", "0.5*x*(1+erf(x/sqrt(2)))", "leaky_relu(x,negative_slope=0.3)+arctan(x)"),
]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)


EVERY_FUNCTION = [f"{name}(x{NEEDED.get(name, '')})" for name in (*ELEMENTARY, *FAMILIES)]


@pytest.mark.sample(7)
@pytest.mark.parametrize("text", [*EXPRESSIONS, *EVERY_FUNCTION])
def test_is_the_compilers_function(text):
    x = torch.cat([torch.linspace(-9, 9, 1801, dtype=torch.float64), torch.tensor([1e-300, 50.0, -50.0])])
    x = x[x != 0]  # the compiler's sign is that of the left piece
    close(expression_function(text)(x), torch.from_numpy(parse_activation(text).function(x.numpy())))


FORMS = [
    *("({a}+{b})", "({a}-{b})", "{a}*{b}", "{a}/(1+abs({b}))", "tanh({a})", "max({a},{b})", "min({a},{b})"),
    *("where({a}<{b},{b},{a})", "clip({a},-1,1)", "softplus({a})", "(-{a})", "abs({a})**0.5", "gelu({a})"),
]


@st.composite
def expressions(draw, depth=3):
    """Expressions of sums, products, choices and functions that stay within the doubles."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["x", "0.5", "2", "pi", "(-1.5)"]))
    part = expressions(depth=depth - 1)
    a, b = draw(part), draw(part)
    form = draw(st.sampled_from(FORMS))
    return form.format(a=a, b=b)


@given(expressions())
def test_any_expression_is_the_compilers_function(text):
    text = f"x+{text}"
    x = torch.linspace(-4, 4, 257, dtype=torch.float64)
    expected = torch.from_numpy(parse_activation(text).function(x.numpy()))
    torch.testing.assert_close(expression_function(text)(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(8)
@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_returns_a_new_tensor_like_its_input(text, dtype):
    function = expression_function(text)
    for layout in SETTLED:
        x = laid_out(layout, dtype)
        y = function(x)
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert y.stride() == torch.empty_like(x).stride(), layout
        assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", [*EXPRESSIONS, *EVERY_FUNCTION])
def test_fakes_foresee_the_layout(text):
    """The compiler reads codes in the order that it foresees."""
    function = expression_function(text)
    for layout in SETTLED:
        x = laid_out(layout, torch.float32)
        with FakeTensorMode() as mode:
            foreseen = function(mode.from_tensor(x)).stride()
        assert function(x).stride() == foreseen, layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_bit_for_bit_what_the_same_calls_of_torch_give(dtype):
    x = laid_out("contiguous", dtype)
    assert_same_bits(expression_function("x*sigmoid(1.702*x)")(x), x * torch.sigmoid(1.702 * x))
    assert_same_bits(expression_function("x*tanh(softplus(x))")(x), x * torch.tanh(F.softplus(x)))


@pytest.mark.sample(10)
@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_float32_rounded_once(text, dtype):
    function = expression_function(text)
    x = laid_out("contiguous", dtype)
    assert_same_bits(function(x), function(x.float()).to(dtype))


def test_one_canonical_text_for_every_spelling():
    assert canonical_text(" X_ * 2".replace("X_", "x")) == "x*2"
    assert canonical_text("Swish(x) + maximum(x, 1.0)") == "silu(x)+max(x,1)"
    assert canonical_text("Softplus(beta=2.0)") == "softplus(beta=2)"


@pytest.mark.parametrize("text", ["gelu", "softplus(beta=2)"])
def test_a_name_is_no_expression(text):
    with pytest.raises(FewbitError, match=r"^an expression has x in it, unlike "):
        expression_function(text)


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')*x", "x.real", "[x]", "lambda x: x", "x if x else x", "x@x", "foo(x)"),
        *("y*x", "x(x)"),
    ],
)
def test_nothing_else_is_taken(text):
    with pytest.raises(FewbitError) as caught:
        fewbit.FewBit(text)
    assert "\n" not in str(caught.value)


def test_float64_keeps_its_digits_where_a_choice_is_between_numbers():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert expression_function("where(x>0,0.1,1/3)")(x).tolist() == [1 / 3, 0.1]
    assert np.array_equal(expression_function("max(0.1,0.3*x)")(x).numpy(), [0.1, 0.3])
