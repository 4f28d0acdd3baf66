"""GELU that saves its output and one bit: its derivative, what it saves, conversion."""

import math

import fewbit
import pytest
import torch
from fewbit import FewbitError, memory
from torch import nn

modes = pytest.mark.parametrize("approximate", ["none", "tanh"])
# Of the derivative: interpolation between values of g, and for half precision the rounding of the output, whose
# distance from the minimum counts by its root.
LARGEST = {torch.float64: 3e-4, torch.float32: 3e-4, torch.float16: 0.03, torch.bfloat16: 0.06}


@modes
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_the_derivative_is_torchs(approximate, dtype):
    x = torch.cat([torch.linspace(-15, 15, 20_001), torch.linspace(-0.76, -0.74, 101)]).to(dtype)
    found, exact = (
        torch.autograd.grad(f(leaf := x.clone().requires_grad_()).sum(), leaf)[0]
        for f in (fewbit.GELU(approximate, keep="output"), nn.GELU(approximate))
    )
    assert (found - exact).abs().max() < LARGEST[dtype]
    assert torch.equal(fewbit.GELU(approximate, keep="output")(x.requires_grad_()), nn.GELU(approximate)(x))


def test_one_bit_is_saved_beside_what_the_next_layer_saves():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    exact = memory.profile(model, x).total
    report = fewbit.convert(model, fewbit.Activations(keep="output"))
    assert [(row.bits, row.error) for row in report.replaced] == [(1, 0.0)]
    assert memory.profile(model, x).total == exact - 128 * 256 * 4 + 128 * 256 // 8
    fewbit.revert(model)
    assert type(model[1]) is nn.GELU


def test_other_activations_save_codes():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
    (row,) = fewbit.convert(model, fewbit.Activations(2, keep="output")).replaced
    assert row.bits == 2 and "SiLU(bits=2" in row.now


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 7, 3)])
def test_any_shape_and_layout(shape):
    x = torch.randn(shape)
    for given in (x, x.flip(0) if shape else x, x.mT if len(shape) > 1 else x):
        leaf = given.clone().requires_grad_()
        fewbit.GELU(keep="output")(leaf).sum().backward()
        right = torch.autograd.functional.jacobian(lambda t: nn.GELU()(t).sum(), given)
        assert torch.allclose(leaf.grad, right, atol=3e-4)


def test_numbers_that_are_not_finite():
    """NaN stays NaN. At infinities torch's own gradient is a limit or NaN, by the processor."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], requires_grad=True)
    (found,) = torch.autograd.grad(fewbit.GELU(keep="output")(x).sum(), x)
    of_nan, of_inf, of_minus_inf, of_zero = found.tolist()
    assert math.isnan(of_nan) and of_zero == pytest.approx(0.5, abs=3e-4)
    assert math.isnan(of_inf) or of_inf == pytest.approx(1.0, abs=3e-4)
    assert math.isnan(of_minus_inf) or of_minus_inf == pytest.approx(0.0, abs=3e-4)


def test_compiled_gradients_are_eager_ones():
    act, x = fewbit.GELU(keep="output"), torch.randn(64, 32, requires_grad=True)
    (eager,) = torch.autograd.grad(act(x).square().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(act, backend="aot_eager", fullgraph=True)(x).square().sum(), x)
    assert torch.allclose(eager, found, atol=1e-6)


def test_integers_and_wrong_arguments_are_refused():
    with pytest.raises(FewbitError, match="keep is 'codes' or 'output', not 'input'"):
        fewbit.GELU(keep="input")
    with pytest.raises(FewbitError, match="has no codes"):
        fewbit.GELU(bits=2, keep="output")
    with pytest.raises(FewbitError, match="keep is"):
        fewbit.Activations(keep=1)
