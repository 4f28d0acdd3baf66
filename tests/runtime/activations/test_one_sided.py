"""Bounds that are infinite: a clamp on one side is exact in one bit, like any other piecewise linear activation."""

import math
import pickle

import fewbit
import pytest
import torch
from runtime_cases import DTYPES, HALVES, all_halves, around, assert_same_bits, function_name
from torch import nn

INF = math.inf
CASES = [
    *(("Hardtanh", (-0.1, INF)), ("Hardtanh", (-INF, 0.1)), ("Hardtanh", (-INF, INF)), ("Threshold", (0.1, -INF))),
    *(("Threshold", (-INF, 3.0)), ("Threshold", (INF, 3.0)), ("Hardshrink", (INF,)), ("Hardshrink", (-INF,))),
]
cases = pytest.mark.parametrize(("name", "arguments"), CASES)


def finite(dtype):
    """All that is near a bound, and all numbers of a 16-bit type; torch's f' at infinity is another (see below)."""
    x = around([-0.1, 0.0, 0.1], dtype)
    if dtype in HALVES:
        x = torch.cat([x, all_halves(dtype)])
    return x[x.isfinite()]


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_torchs(name, arguments, dtype):
    ours, theirs = getattr(fewbit, name)(*arguments), getattr(nn, name)(*arguments)
    assert ours.bits == 1 and ours.table.error == 0
    x = finite(dtype).requires_grad_()
    grad = torch.linspace(-2, 2, x.numel(), dtype=torch.float64).to(dtype)
    y, expected = ours(x), theirs(x)
    assert_same_bits(y, expected)
    (gradient,), (exact,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad)
    assert torch.equal(gradient, exact)
    function = getattr(fewbit.functional, function_name(name))
    (gradient,) = torch.autograd.grad(function(x, *arguments), x, grad)
    assert torch.equal(gradient, exact)


@cases
def test_values_at_infinity_are_torchs_and_the_gradient_that_beside_it(name, arguments):
    x = torch.tensor([-INF, -1e38, 1e38, INF], dtype=torch.float64, requires_grad=True)
    y = getattr(fewbit, name)(*arguments)(x)
    assert_same_bits(y, getattr(nn, name)(*arguments)(x))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[0] == gradient[1]
    assert gradient[2] == gradient[3]


@pytest.mark.sample(3)
@cases
def test_modules_compile_pickle_and_convert(name, arguments):
    theirs = getattr(nn, name)(*arguments)
    model = nn.Sequential(nn.Linear(4, 4), theirs)
    x = torch.randn(8, 4)
    expected = model(x)
    report = fewbit.convert(model)
    assert [row.bits for row in report.replaced] == [1] and "inf" in repr(model[1])
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    assert fewbit.revert(model)[1] is theirs


@pytest.mark.parametrize(
    "text",
    ["hardtanh(min_val=0,max_val=inf)", "hardtanh(x,min_val=0,max_val=inf)", "threshold(threshold=0,value=-inf)"],
)
def test_texts_have_infinite_bounds_too(text):
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    module = fewbit.FewBit(text)
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert module.bits == 1 and gradient.tolist() == [0, 1]
    table = fewbit.solve(text)
    assert table.error == 0 and table.boundaries.tolist() == [0] and fewbit.solve(table.activation).key == table.key
