"""Appendix B against what repeated compression does to the gradients."""

from dataclasses import dataclass

import pytest
import torch
from fewbit.runtime import layers
from fewbit.runtime.allocation.sensitivity import gradient_factor, quantization_variance
from fewbit.runtime.quantizers import PerGroup
from torch import nn

DRAWS = 300


def test_variance_of_the_quantizer():
    """V is that of uniformly distributed fractions: so it is found at 8 bits, where (2^8 − 1)² divides it."""
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7)[:, None]
    errors = torch.stack([(PerGroup(8).compress(x).decompress() - x).double().square().sum(1) for _ in range(20)])
    V = quantization_variance(x, 256)
    torch.testing.assert_close(errors.mean(0) * 255**2, V, rtol=0.1, atol=0)


def test_infinite_and_constant_groups_count_as_nothing():
    x = torch.randn(3, 512)
    x[0, :256] = torch.inf
    x[1, :256] = 2.0
    alone = quantization_variance(x[:, 256:].contiguous(), 256)
    assert torch.equal(quantization_variance(x, 256)[:2], alone[:2])
    assert quantization_variance(torch.empty(3, 0), 256).tolist() == [0, 0, 0]
    assert quantization_variance(torch.ones(3, 300), 256).tolist() == [0, 0, 0]


CASES = {
    "linear": (lambda: layers.Linear(64, 32), (8, 64)),
    "tokens": (lambda: layers.Linear(64, 32), (8, 10, 64)),
    "conv": (lambda: layers.Conv2d(16, 8, 3, padding=1), (8, 16, 12, 12)),
    "strided": (lambda: layers.Conv2d(16, 8, 3, padding=1, stride=2), (8, 16, 12, 12)),
    "grouped": (lambda: layers.Conv2d(16, 8, 3, padding=1, groups=4), (8, 16, 12, 12)),
    "conv1d": (lambda: layers.Conv1d(16, 8, 5, padding=2), (8, 16, 40)),
    "transposed": (lambda: layers.ConvTranspose2d(16, 8, 2, stride=2), (8, 16, 12, 12)),
    "batch norm": (lambda: layers.BatchNorm2d(16, track_running_stats=False), (8, 16, 12, 12)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_sum_of_sensitivities_is_the_variance_of_the_weights_gradient(case, bits):
    """Within a quarter: the mean of a product is taken for the product of means."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape) * torch.exp2(torch.randn(shape[0], *[1] * (len(shape) - 1)))
    layer.saver = Seen(layers.QuantizerSaver(PerGroup(bits)))
    gradient = None
    found = []
    for _ in range(DRAWS):
        y = layer(x)
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        (grad,) = torch.autograd.grad(y, layer.weight, gradient)
        found.append(grad.flatten())
    seen = layer.saver
    w = quantization_variance(seen.x, 256) * gradient_factor(layer, gradient, x.shape, seen.rstd)
    measured = torch.stack(found).double().var(0).sum()
    assert 0.75 < measured * (2**bits - 1) ** 2 / w.sum() < 1.25


@dataclass
class Seen:
    """Saves through `saver`, and remembers what a layer compressed and the 1/deviation that it reported."""

    saver: layers.Saver

    def compress(self, x):
        self.x = x.clone()
        return self.saver.compress(x)

    def observe(self, gradient, rstd=None):
        self.rstd = rstd


OTHERS = [layers.LayerNorm(32), layers.GroupNorm(4, 16), layers.InstanceNorm1d(16, affine=True), layers.RMSNorm(32)]


@pytest.mark.parametrize("layer", OTHERS)
def test_other_normalizations_have_the_scale_of_their_weights_gradient(layer):
    """All of deviation 3, where the part of ∇X is small: V times the mean of ∇², as for a product with x̄."""
    layer.saver = Seen(layers.ExactSaver())
    x = torch.randn(6, 16, 32) * 3
    gradient = torch.randn(6, 16, 32)
    layer(x).backward(gradient)
    t = gradient_factor(layer, gradient, x.shape, layer.saver.rstd)
    torch.testing.assert_close(t, gradient.square().flatten(1).mean(1), rtol=0.05, atol=0)
    before = gradient_factor(layer, gradient, x.shape, layer.saver.rstd, 9)  # nine layers, each 1/9 as much
    torch.testing.assert_close(before / t, torch.full((6,), 2.0), rtol=0.1, atol=0)


@pytest.mark.parametrize("layer", [layers.LayerNorm(64), layers.RMSNorm(64, eps=1e-6)])
def test_rows_of_zeros_do_not_draw_bits_to_their_sample(layer):
    """Their 1/deviation is a thousand times that of others, and nothing of them is rounded."""
    layer.saver = Seen(layers.ExactSaver())
    x, gradient = torch.randn(2, 16, 64), torch.randn(1, 16, 64).expand(2, 16, 64)
    x[1, :4] = 0
    layer(x).backward(gradient)
    t = gradient_factor(layer, gradient, x.shape, layer.saver.rstd, 3)
    assert t[1] <= t[0] * 1.1


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(8)])
def test_of_float64_they_are_those_of_float32(layer):
    """Torch narrows no norm: models in float64 did not train with bits by sensitivity, at the levels from L3 on."""
    gradient, shape = torch.randn(3, 8, 6, 6, dtype=torch.float64), torch.Size([3, 8, 8, 8])
    rstd = torch.rand(8, dtype=torch.float64)
    t = gradient_factor(layer, gradient, shape, rstd)
    assert t.dtype == torch.float32
    torch.testing.assert_close(t, gradient_factor(layer, gradient.float(), shape, rstd.float()))


def test_what_has_no_formula_counts_the_mean_square():
    gradient = torch.randn(3, 4, 5)
    t = gradient_factor(nn.Softmax(-1), gradient, gradient.shape, None)
    torch.testing.assert_close(t, gradient.square().flatten(1).mean(1))
    assert gradient_factor(nn.Softmax(-1), torch.empty(0, 3), torch.Size([0, 3]), None).shape == (0,)
