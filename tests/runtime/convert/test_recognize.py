import math
import subprocess
import sys

import pytest
import torch
from activation_cases import TIMM, TORCH, define
from fewbit.fewbit_gen.activations import parse_activation
from fewbit.runtime.convert.recognize import LAPLACE, SQRT_SOFTPLUS, Recognized, recognize, why_left
from torch import nn


def assert_is_the_compilers(module, activation):
    """The compiler reads `activation` back, as the function that the module computes."""
    compiled = parse_activation(activation)
    assert compiled.name == activation
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(torch.from_numpy(compiled.function(x.numpy())), module(x.clone()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("module", "arguments", "activation"), TORCH, ids=str)
def test_torchs_classes_are_read_with_their_arguments_and_the_compiler_knows_them(module, arguments, activation):
    found = recognize(module)
    inplace = getattr(module, "inplace", False)
    assert found == Recognized(type(module).__name__, arguments, activation, inplace)
    again = getattr(nn, found.name)(**dict(found.arguments))
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(again(x), module(x.clone()))
    assert why_left(module) is None
    assert_is_the_compilers(module, activation)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("gelu", ("GELU", "gelu", None)),
        ("gelu_fast", ("GELU", "gelu_tanh", "fast_gelu")),
        ("gelu_new", ("GELU", "gelu_tanh", "new_gelu")),
        ("gelu_python", ("GELU", "gelu", "python_gelu")),
        ("gelu_pytorch_tanh", ("GELU", "gelu_tanh", None)),
        ("gelu_python_tanh", ("GELU", "gelu_tanh", "new_gelu")),
        ("gelu_accurate", ("GELU", "gelu_tanh", "new_gelu")),
        ("hardswish", ("Hardswish", "hardswish", None)),
        (
            "laplace",
            ("Laplace", LAPLACE, "laplace"),
        ),
        ("leaky_relu", ("LeakyReLU", "leaky_relu", None)),
        ("mish", ("Mish", "mish", None)),
        ("quick_gelu", ("QuickGELU", "quick_gelu", None)),
        ("relu", ("ReLU", "relu", None)),
        ("relu2", ("SquaredReLU", "squared_relu", None)),
        ("relu6", ("ReLU6", "relu6", None)),
        ("sigmoid", ("Sigmoid", "sigmoid", None)),
        ("silu", ("SiLU", "silu", None)),
        ("sqrtsoftplus", ("SqrtSoftplus", SQRT_SOFTPLUS, "sqrt_softplus")),
        ("swish", ("SiLU", "silu", None)),
        ("tanh", ("Tanh", "tanh", None)),
    ],
)
def test_those_of_transformers(key, expected):
    activations = pytest.importorskip("transformers.activations")
    if key not in activations.ACT2FN:
        pytest.skip(f"this transformers has no {key}")
    module = activations.ACT2FN[key]
    found = recognize(module)
    assert (found.name, found.activation, found.formula) == expected
    assert_is_the_compilers(module, found.activation)


@pytest.mark.parametrize(
    ("key", "why"),
    [("gelu_10", "cut to a range"), ("linear", "the identity"), ("prelu", "learned"), ("xielu", "learned")],
)
def test_those_of_transformers_that_are_left(key, why):
    activations = pytest.importorskip("transformers.activations")
    module = activations.ACT2FN[key]
    assert recognize(module) is None
    assert why in why_left(module)


def test_every_activation_of_transformers_is_recognized_or_left_for_a_reason():
    activations = pytest.importorskip("transformers.activations")
    for key in activations.ACT2CLS:
        module = activations.ACT2FN[key]
        assert (recognize(module) is None) == (why_left(module) is not None), key


@pytest.mark.parametrize("package", ["timm.layers.activations", "timm.models.layers.activations"])
@pytest.mark.parametrize(("name", "forward", "expected"), TIMM, ids=[row[0] for row in TIMM])
def test_those_of_timm(package, name, forward, expected):
    module = define(package, name, forward, inplace=False)()
    found = recognize(module)
    assert (found.name, found.activation, found.formula) == expected
    assert_is_the_compilers(module, found.activation)


def test_in_place_sigmoid_of_timm_is_not_torchs_module():
    module = define("timm.layers.activations", "Sigmoid", lambda self, x: x.sigmoid_())()
    module.inplace = True
    assert recognize(module) == Recognized("Sigmoid", (), "sigmoid", inplace=True, formula="sigmoid_in_place")


def test_a_subclass_is_its_parent_unless_it_has_a_forward():
    class Same(nn.GELU):
        tag = 1

    class Grandchild(Same):
        pass

    class Other(nn.GELU):
        def forward(self, input):
            return super().forward(input) + 1

    class Wrapped(nn.GELU):
        def __call__(self, input):
            return -super().__call__(input)

    assert recognize(Same("tanh")) == recognize(Grandchild("tanh")) == recognize(nn.GELU("tanh"))
    for cls in (Other, Wrapped):
        assert recognize(cls()) is None
        assert why_left(cls()) == "its class brings a forward of its own, not that of GELU"


def with_another_forward():
    module = nn.GELU()
    module.forward = lambda x: x
    return module


NOT_FOR_FEW_BITS = (nn.PReLU(), nn.RReLU(), nn.GLU(), nn.Softmax(0), nn.Softmin(0), nn.Softmax2d(), nn.LogSoftmax(0))
NO_ACTIVATIONS = (nn.Linear(2, 2), nn.Dropout(), nn.Identity(), nn.Sequential(nn.ReLU()), nn.LSTM(2, 2))
LEFT = {
    **dict.fromkeys(NOT_FOR_FEW_BITS, ""),
    define("timm.layers.activations", "PReLU", lambda self, x: x, base=nn.PReLU)(): "learned",
    with_another_forward(): "its forward was replaced on the instance",
    # What is no activation, or has the name of one alone, is left without a reason.
    **dict.fromkeys(NO_ACTIVATIONS),
    define("somewhere.else", "GELU", lambda self, x: x)(): None,
}


@pytest.mark.parametrize(("module", "why"), LEFT.items(), ids=lambda value: type(value).__name__)
def test_what_few_bits_cannot_stand_for_is_left(module, why):
    assert recognize(module) is None
    found = why_left(module)
    assert found is None if why is None else found and why in found


@pytest.mark.deep
def test_neither_package_is_imported():
    script = """
import sys, torch
from fewbit.runtime.convert.recognize import recognize
assert recognize(torch.nn.GELU()).activation == "gelu"
assert not {"transformers", "timm"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_numbers_that_are_odd_have_canonical_names():
    assert recognize(nn.Softplus(beta=1e-5)).activation == "softplus(beta=1e-05)"
    assert recognize(nn.LeakyReLU(-0.0)).activation == "leaky_relu(negative_slope=0)"
    assert recognize(nn.ELU(math.pi)).activation == "elu(alpha=3.141592653589793)"
