"""Every backend's kernels of pre-activation layers, beside plain torch."""

from unittest.mock import patch

import pytest
import torch
from fewbit.runtime.backends.cuda import preact as cuda
from fewbit.runtime.layers.preact import function as codes_module
from preact_cases import KERNELS, LAYOUTS, case, through_a_layer


def in_plain_torch(*arguments):
    """`through_a_layer` without kernels."""
    with patch.object(codes_module, "has_kernels", lambda x: False), patch.object(cuda, "serves", lambda x: False):
        return through_a_layer(*arguments)


def on(backend, *arguments):
    """`through_a_layer` by the kernels of a backend, the results on the CPU."""
    results = through_a_layer(*map(backend.put, arguments))
    return [result if result is None else result.cpu() for result in results]


def assert_launched(backend, kernels):
    """Nothing but these CUDA kernels ran where they run on the CPU: plain torch did not take over."""
    assert backend.launched == (kernels if backend.name == "host-cuda" else [])


@pytest.mark.sample(37)
@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, 1), (torch.float32, 3), (torch.float32, 4), (torch.bfloat16, 4)]
)
def test_are_as_plain_torch(backend, dtype, bits, name, slope):
    *vectors, gradient = case(name, dtype)
    packed, A, activated, dx, dγ, dβ = on(backend, *vectors, bits, slope, gradient)
    assert_launched(backend, KERNELS)
    expected = in_plain_torch(*vectors, bits, slope, gradient)
    assert torch.equal(packed, expected[0])
    assert torch.equal(A, expected[1]) and A.stride() == expected[1].stride()
    precision = torch.finfo(dtype).eps
    # dx is rounded once, and by plain torch twice; sums are added in another order.
    torch.testing.assert_close(activated, expected[2], rtol=0, atol=0)
    for ours, theirs in zip((dx, dγ, dβ), expected[3:], strict=True):
        scale = theirs.abs().max().item()
        tolerance = 2 * precision if ours.dtype == dtype else 1e-5
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=max(tolerance, 1e-5) * scale)


@pytest.mark.parametrize(("by_batch", "into_input"), [(False, True), (True, False)])
def test_running_statistics_and_an_input_without_gradient(backend, by_batch, into_input):
    *vectors, gradient = case("planes")
    *_, dx, dγ, dβ = on(backend, *vectors, 4, 0.0, gradient, by_batch, into_input)
    assert_launched(backend, KERNELS if into_input else KERNELS[:-1])
    *_, dx_expected, dγ_expected, dβ_expected = in_plain_torch(*vectors, 4, 0.0, gradient, by_batch, into_input)
    assert (dx is None) == (dx_expected is None) == (not into_input)
    if dx is not None:
        torch.testing.assert_close(dx, dx_expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dγ.double(), dγ_expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dβ.double(), dβ_expected, rtol=1e-5, atol=1e-4)


def test_a_relu_gate_stops_infinite_gradients(backend):
    *vectors, gradient = case("planes")
    vectors[3].fill_(-9.0)  # β: nothing is positive
    gradient.fill_(torch.inf)
    dx, dγ, dβ = on(backend, *vectors, 4, 0.0, gradient)[3:]
    assert dx.count_nonzero() == dγ.count_nonzero() == dβ.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(4, 8, 9, 7), (2, 8, 16, 16)])
@pytest.mark.parametrize("bits", [1, 4])
def test_whatever_γ_and_β(backend, shape, bits):
    nan, inf = float("nan"), float("inf")
    γ = torch.tensor([1e-38, -2.0, 3.0, 1e37, nan, 1e-3, 1.0, -1e-40])
    β = torch.tensor([1.0, inf, -9.0, 1e35, 0.0, nan, -1e30, -0.0])
    A = 10 * torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    arguments = A, A, γ, β, torch.zeros(8), torch.rand(8), bits, 0.1, torch.randn(shape)
    packed, _, activated, *gradients = on(backend, *arguments)
    expected, _, plainly, *those = in_plain_torch(*arguments)
    assert torch.equal(packed, expected)
    torch.testing.assert_close(activated, plainly, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(gradients, those, strict=True):
        # To the roundings of float32, of the largest number of each channel: γ are of every size.
        one, other = (t.double().transpose(0, 1).reshape(8, -1) if t.dim() == 4 else t.double() for t in (ours, theirs))
        assert torch.equal(one.isnan(), other.isnan())
        scale = other.nan_to_num(0).abs().amax(-1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 14])
def test_what_lies_beyond_the_end_of_a_flat_channel_leaves_the_last_codes_alone(backend, n):
    """Of 2 bits, whose bytes are added up to a word: nothing may stand above a code."""
    A = torch.linspace(-2, 2, n).view(n, 1)
    for β in (1.0, 0.0, -1.0):
        vectors = torch.zeros(1), torch.tensor([β]), torch.zeros(1), torch.ones(1)
        arguments = A, A, *vectors, 2, 0.0, torch.ones(n, 1)
        assert torch.equal(on(backend, *arguments)[0], in_plain_torch(*arguments)[0])


def test_what_was_normalized_by_statistics_of_16_bits_is_rounded_once(backend):
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    mean, r = (torch.tensor([number], dtype=torch.bfloat16) for number in (0.337, 1.337))
    arguments = x, x, torch.zeros(1), torch.ones(1), mean, r, 8, 0.0, torch.ones_like(x)
    packed = on(backend, *arguments)[0]
    assert torch.equal(packed, in_plain_torch(*arguments)[0])
    single = x, x, torch.zeros(1), torch.ones(1), mean.float(), r.float(), 8, 0.0, torch.ones_like(x)
    assert torch.equal(packed, on(backend, *single)[0])
