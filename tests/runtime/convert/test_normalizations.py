"""Normalizations that save their output: torch's forward bit for bit, the gradient within rounding, one copy saved."""

import fewbit
import pytest
import torch
from fewbit.layers import KeepOutput
from torch import nn


class Gemmas(nn.Module):
    """RMS normalization with 1 + w, as Gemma's."""

    def __new__(cls, size):
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

        return Gemma2RMSNorm(size)


def llamas(size):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(size)


NORMS = [nn.LayerNorm, lambda n: nn.LayerNorm(n, bias=False), nn.RMSNorm, llamas, Gemmas]
NORMS += [lambda n: nn.LayerNorm(n, elementwise_affine=False)]


def between(norm, dtype=torch.float32):
    """The norm between linear layers, with weights and biases that are not those of the beginning."""
    model = nn.Sequential(nn.Linear(32, 64), norm, nn.Linear(64, 16))
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.rand_like(p))
    return model.to(dtype)


def gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [x.grad, *(p.grad.clone() for p in model.parameters())]


def error(found, exact):
    wrong = sum(((a - b).double() ** 2).sum() for a, b in zip(found, exact, strict=True))
    return float((wrong / sum((b.double() ** 2).sum() for b in exact)).sqrt())


# The output is rounded once to its dtype, and the sums of the gradient average that out. transformers' normalizations
# compute in float32 whatever the dtype.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("make", NORMS)
def test_the_gradient_is_torchs_within_the_outputs_rounding(make, dtype, most):
    model, x = between(make(64), dtype), torch.randn(3, 7, 32, dtype=dtype)
    y, exact = gradients(model, x)
    report = fewbit.convert(model, fewbit.Normalizations())
    assert [row.name for row in report.replaced] == ["1"] and "KeepOutput" in str(report)
    found_y, found = gradients(model, x)
    assert torch.equal(found_y, y)
    in_single = make in (llamas, Gemmas)
    assert error(found, exact) < (max(most, 2e-6) if in_single else most)


@pytest.mark.parametrize("make", NORMS)
def test_the_input_is_not_saved(make):
    model, x = between(make(64)), torch.randn(4, 16, 32)
    exact = fewbit.memory.profile(model, x).total
    fewbit.convert(model, fewbit.Normalizations())
    kept = fewbit.memory.profile(model, x).total
    rows = 4 * 16
    assert kept <= exact - 4 * rows * 64 + 2 * 4 * rows  # but the mean and 1/deviation of each row


def test_a_weight_near_zero_saves_the_input():
    norm = nn.LayerNorm(64)
    model, x = between(norm), torch.randn(5, 32)
    with torch.no_grad():
        norm.weight[3] = 0
    _, exact = gradients(model, x)
    fewbit.convert(model, fewbit.Normalizations())
    _, found = gradients(model, x)
    assert error(found, exact) < 2e-6
    assert float(model[1].weight.grad[3].abs()) > 0


def test_what_is_not_finite_stays_so():
    model, x = between(nn.RMSNorm(64)), torch.randn(5, 32)
    x[0, 0] = float("nan")
    fewbit.convert(model, fewbit.Normalizations())
    _, found = gradients(model, x)
    assert found[0][0].isnan().all() and found[0][1:].isfinite().all()


def test_activations_stay_as_they_are_unless_they_are_asked_for():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    fewbit.convert(model, fewbit.Normalizations())
    assert type(model[2]) is nn.GELU
    fewbit.convert(model, fewbit.Normalizations(), fewbit.Activations(keep="output"))
    assert model[2].keep == "output" and isinstance(model[0].saver, KeepOutput)


def test_an_empty_batch_and_no_gradient():
    model = between(nn.LayerNorm(64))
    fewbit.convert(model, fewbit.Normalizations())
    assert gradients(model, torch.randn(0, 32))[1][0].shape == (0, 32)
    with torch.no_grad():
        assert not model(torch.randn(3, 32)).requires_grad


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [nn.LayerNorm, llamas])
def test_it_compiles(make):
    model, x = between(make(64)), torch.randn(3, 32)
    fewbit.convert(model, fewbit.Normalizations())
    _, exact = gradients(model, x)
    _, found = gradients(torch.compile(model, backend="aot_eager"), x)
    assert error(found, exact) < 2e-6
