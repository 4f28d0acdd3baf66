import copy
import gc
import pickle
import weakref
from unittest.mock import patch

import fewbit
import pytest
import torch
from fewbit import FewbitError, PreActConv1d, PreActConv2d, PreActConv3d, PreActLinear
from fewbit.quantizers import FixedPoint
from fewbit.runtime.layers.preact import function as codes_module
from fewbit.runtime.tensors.packing import packed_size
from torch import nn
from torch.nn import functional as F


def unfused(layer, x):
    """The same layer in torch's own operations."""
    A = layer.norm(x)
    A = F.leaky_relu(A, layer.negative_slope) if layer.negative_slope else F.relu(A)
    for module in layer.before:
        A = module(A)
    return layer.linear(A)


def vary(layer):
    """Give γ and β values of every sign, and running statistics that are not the batch's."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if layer.norm.affine:
            γ = torch.randn(layer.norm.weight.shape, generator=g) + 0.5
            layer.norm.weight.copy_(γ + 0.2 * γ.sign())
            layer.norm.bias.copy_(torch.randn(layer.norm.bias.shape, generator=g))
        if layer.norm.running_mean is not None:
            layer.norm.running_mean.normal_(generator=g)
            layer.norm.running_var.uniform_(0.5, 2, generator=g)
    return layer


def both(layer, x):
    """Outputs, and gradients of x and every parameter, of the layer and of its copy in torch's operations."""
    results = []
    for run, one in ((lambda m, v: m(v), layer), (unfused, copy.deepcopy(layer))):
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        out = run(one, leaf)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        one.zero_grad()
        out.backward(weights)
        gradients = {name: p.grad for name, p in one.named_parameters()}
        results.append((out, {"x": leaf.grad, **gradients}, dict(one.named_buffers())))
    return results


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.nan_to_num(-9), b.nan_to_num(-9))


CASES = {
    "1d": (lambda **k: PreActConv1d(6, 5, 3, padding=1, **k), (4, 6, 17)),
    "2d": (lambda **k: PreActConv2d(6, 5, 3, stride=2, padding=1, **k), (4, 6, 9, 7)),
    "3d": (lambda **k: PreActConv3d(6, 4, 3, dilation=2, padding=2, **k), (2, 6, 5, 4, 6)),
    "linear": (lambda **k: PreActLinear(6, 5, **k), (33, 6)),
    "1x1": (lambda **k: PreActConv2d(16, 8, 1, bias=False, **k), (3, 16, 12, 12)),
    "grouped": (lambda **k: PreActConv2d(6, 4, 3, groups=2, **k), (4, 6, 9, 7)),
    "same": (lambda **k: PreActConv2d(6, 4, (4, 3), padding="same", **k), (4, 6, 9, 7)),
    "reflected": (lambda **k: PreActConv2d(6, 4, 3, padding=1, padding_mode="reflect", **k), (4, 6, 9, 7)),
    "circular, same": (lambda **k: PreActConv1d(6, 4, 4, padding="same", padding_mode="circular", **k), (4, 6, 9)),
    "pooled": (lambda **k: PreActConv2d(6, 4, 1, pool=nn.AvgPool2d(2), **k), (4, 6, 9, 7)),
    "head": (lambda **k: PreActLinear(6, 5, pool=nn.AdaptiveAvgPool2d(1), **k), (4, 6, 9, 7)),
    "head of 2x2": (lambda **k: PreActLinear(24, 5, channels=6, pool=nn.AdaptiveAvgPool2d(2), **k), (4, 6, 9, 7)),
    "no parameters": (lambda **k: PreActConv2d(6, 4, 3, affine=False, **k), (4, 6, 9, 7)),
    "no statistics": (lambda **k: PreActConv2d(6, 4, 3, track_running_stats=False, **k), (4, 6, 9, 7)),
    "cumulative": (lambda **k: PreActConv2d(6, 4, 3, momentum=None, **k), (4, 6, 9, 7)),
}
cases = pytest.mark.parametrize("make, shape", CASES.values(), ids=CASES.keys())
slopes = pytest.mark.parametrize("slope", [0.0, 0.1])


@cases
@slopes
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bits", [4, None])
def test_forward_and_statistics_are_torchs_bit_for_bit(make, shape, slope, training, bits):
    layer = vary(make(negative_slope=slope, bits=bits)).train(training)
    for seed in range(2):  # twice: statistics move
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1
        (ours, gradients, buffers), (theirs, expected, expected_buffers) = both(layer, x)
        assert same(ours, theirs)
        assert buffers.keys() == expected_buffers.keys()
        assert all(same(buffers[name], expected_buffers[name]) for name in buffers)
        assert gradients.keys() == expected.keys()
        if bits is None:
            assert all(same(gradients[name], expected[name]) for name in expected)


@cases
@slopes
def test_with_running_statistics_the_input_gradient_is_exact(make, shape, slope):
    layer = vary(make(negative_slope=slope, bits=2)).eval()
    if layer.norm.running_mean is None:
        pytest.skip("there are none")
    (_, ours, _), (_, theirs, _) = both(layer, torch.randn(shape))
    torch.testing.assert_close(ours["x"], theirs["x"], rtol=1e-6, atol=1e-6)


@cases
@slopes
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_the_input_gradient_is_off_by_the_one_term_that_the_paper_names(make, shape, slope, bits):
    """Equation 8: with x̂ = A₁, only γ(σ² + ε)^{−1/2} ∘ x̂ ∘ Mean(x̂ ∘ ∇A₂) knows the approximation."""
    layer = vary(make(negative_slope=slope, bits=bits)).double()
    x = torch.randn(shape, dtype=torch.float64)
    (_, ours, _), (_, theirs, _) = both(layer, x)
    norm, dims = layer.norm, [d for d in range(x.dim()) if d != 1]
    form = [1, -1] + [1] * (x.dim() - 2)
    γ = norm.weight.detach() if norm.affine else torch.ones(shape[1]).double()
    β = norm.bias.detach() if norm.affine else torch.zeros(shape[1]).double()
    deviation = (x.var(dims, correction=0) + norm.eps).sqrt().view(form)
    x̂ = (x - x.mean(dims, keepdim=True)) / deviation
    A = copy.deepcopy(norm)(x).detach()  # to the last bit what is coded
    approximate = FixedPoint(bits).compress(A, scale=γ, shift=β).decompress()
    x̃ = (approximate - β.view(form)) / γ.view(form)
    leaf = A.requires_grad_()
    unfused_rest = F.leaky_relu(leaf, slope) if slope else F.relu(leaf)
    for module in layer.before:
        unfused_rest = module(unfused_rest)
    out = layer.linear(unfused_rest)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (dA,) = torch.autograd.grad(out, leaf, weights)

    def term(normal):
        return γ.view(form) / deviation * normal * (normal * dA).mean(dims, keepdim=True)

    assert (ours["x"] - theirs["x"]).abs().max() > 0
    # Codes mean float32 numbers, whose rounding is all that the difference leaves.
    torch.testing.assert_close(ours["x"] - theirs["x"], term(x̂) - term(x̃), rtol=1e-5, atol=1e-5)
    for name, gradient in theirs.items():
        if name in ("norm.bias", "linear.bias"):
            torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", range(1, 9))
def test_gradients_of_weights_are_those_at_the_approximate_activations(bits):
    layer = vary(PreActConv2d(6, 5, 3, bits=bits))
    x = torch.randn(4, 6, 9, 7)
    (_, ours, _), _ = both(layer, x)
    A = layer.norm(x).detach()
    approximate = FixedPoint(bits).compress(A, scale=layer.norm.weight, shift=layer.norm.bias).decompress()
    weight = layer.linear.weight.detach().requires_grad_()
    out = F.conv2d(approximate.relu(), weight, layer.linear.bias.detach())
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(ours["linear.weight"], weight.grad, rtol=1e-5, atol=1e-5)


class TestWhatIsKept:
    @cases
    @pytest.mark.parametrize("bits", range(1, 9))
    def test_is_the_code_and_a_number_a_channel(self, make, shape, bits):
        layer = make(bits=bits)
        x = torch.randn(shape)
        vector = 4 * shape[1]
        assert fewbit.memory.profile(layer, x).total == packed_size(x.numel(), bits) + vector
        exact = fewbit.memory.profile(make(bits=None), x).total
        assert exact == 4 * x.numel() + 2 * vector

    def test_not_the_input_and_nothing_in_between(self):
        layers = nn.Sequential(*(PreActConv2d(4, 4, 3, padding=1) for _ in range(3)))
        seen = []
        for layer in layers:
            layer.register_forward_hook(lambda _, inputs, output: seen.extend(map(weakref.ref, (*inputs, output))))
        out = layers(torch.randn(2, 4, 8, 8) * 1)
        gc.collect()
        alive = [r() for r in seen if r() is not None]
        assert len(alive) == 1 and alive[0] is out

    def test_nothing_without_gradients(self):
        layer, x = PreActConv2d(4, 4, 3), torch.randn(2, 4, 8, 8)
        expected = unfused(copy.deepcopy(layer), x)
        with torch.no_grad():
            out = layer(x)
        assert same(out, expected) and out.grad_fn is None
        assert layer.norm.num_batches_tracked == 1

    def test_changing_γ_before_backward_is_told(self):
        layer = PreActConv2d(4, 4, 3)
        out = layer(torch.randn(2, 4, 8, 8)).sum()
        with torch.no_grad():
            layer.norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_dtype_and_layout(dtype, layout):
    layer = vary(PreActConv2d(6, 5, 3, bits=8)).to(dtype).to(memory_format=layout)
    x = torch.rand(4, 6, 9, 7).to(dtype).contiguous(memory_format=layout)  # nothing is clipped
    (ours, gradients, _), (theirs, expected, _) = both(layer, x)
    assert same(ours, theirs) and ours.stride() == theirs.stride()
    eps = torch.finfo(dtype).eps
    for name, gradient in expected.items():
        # 8 bits: at most 3/256 of a deviation; and the rounding of sums of 16-bit numbers.
        assert (gradients[name] - gradient).double().norm() <= (0.02 + 8 * eps) * gradient.double().norm(), name


def test_a_strided_input():
    layer = vary(PreActConv2d(3, 5, 3, bits=8))
    (ours, gradients, _), (theirs, expected, _) = both(layer, torch.rand(4, 9, 7, 6).transpose(1, 3)[:, ::2])
    assert same(ours, theirs)
    assert (gradients["x"] - expected["x"]).norm() <= 0.02 * expected["x"].norm()


@pytest.mark.parametrize("stride", [0, 1, 1000])
@pytest.mark.parametrize("γ", [1.5, 0.0])
def test_a_single_channel_may_have_any_stride(stride, γ):
    """A kernel that walked from channel to channel by a stride of 0 would not come to an end."""
    layer = PreActConv2d(1, 5, 3, bits=8)
    nn.init.constant_(layer.norm.weight, γ)
    x = torch.rand(4, 1, 9, 7).as_strided((4, 1, 9, 7), (63, stride, 7, 1))
    (ours, gradients, _), (theirs, expected, _) = both(layer, x)
    assert same(ours, theirs)
    assert (gradients["x"] - expected["x"]).norm() <= 0.02 * expected["x"].norm() + 1e-6


def test_autocast():
    layer = vary(PreActConv2d(6, 5, 3, bits=8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (ours, gradients, _), (theirs, expected, _) = both(layer, torch.rand(4, 6, 9, 7))
    assert ours.dtype == torch.bfloat16 and same(ours, theirs)
    assert all(gradients[name].dtype == torch.float32 for name in gradients)
    assert (gradients["linear.weight"] - expected["linear.weight"]).norm() <= 0.03 * expected["linear.weight"].norm()


def test_nan_goes_on():
    layer = PreActLinear(3, 2)
    x = torch.randn(8, 3)
    x[2, 1] = torch.nan
    (ours, _, _), (theirs, _, _) = both(layer, x)
    assert same(ours, theirs) and ours.isnan().all()


@pytest.mark.parametrize("shape", [(0, 6, 9, 7), (0, 6, 3, 3)])
def test_an_empty_batch(shape):
    layer = PreActConv2d(6, 5, 3).eval()
    out = layer(torch.randn(shape, requires_grad=True))
    assert out.shape[0] == 0
    out.sum().backward()


def test_one_value_a_channel_is_torchs_error():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        PreActLinear(3, 2)(torch.randn(1, 3))


def test_frozen_parameters_get_no_gradient():
    layer = vary(PreActConv2d(6, 5, 3, bits=4))
    layer.linear.weight.requires_grad_(False)
    layer.norm.weight.requires_grad_(False)
    (_, ours, _), (_, theirs, _) = both(layer, torch.randn(4, 6, 9, 7))
    assert ours["linear.weight"] is None and ours["norm.weight"] is None
    assert (ours["x"] - theirs["x"]).norm() < 0.05 * theirs["x"].norm()


def test_an_input_without_gradient():
    layer = PreActConv2d(6, 5, 3)
    layer(torch.randn(4, 6, 9, 7)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


class TestAwkwardChannels:
    """γ = 0, tiny, negative, or far below β: the published code loses the sign at β = −3γ."""

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    @pytest.mark.parametrize("γ, β", [(1.0, -3.0), (1.0, 3.0), (-1.0, 0.3), (1e-20, 1.0), (1e-30, 0.0), (0.5, 1e6)])
    def test_the_input_gradient_has_the_right_mask(self, bits, γ, β):
        layer = PreActConv2d(1, 1, 1, bits=bits)
        with torch.no_grad():
            layer.norm.weight.fill_(γ)
            layer.norm.bias.fill_(β)
        layer.eval()
        (_, ours, _), (_, theirs, _) = both(layer, torch.randn(8, 1, 16, 16))
        torch.testing.assert_close(ours["x"], theirs["x"], rtol=1e-6, atol=0)

    @pytest.mark.parametrize("β", [1.0, 0.0, -1.0])
    @pytest.mark.parametrize("γ", [0.0, -0.0])
    def test_a_scale_of_zero_learns_as_it_does_exactly(self, γ, β):
        layer = PreActConv2d(3, 2, 3, bits=8)
        with torch.no_grad():
            layer.norm.weight[1], layer.norm.bias[1] = γ, β
        (ours, gradients, _), (theirs, expected, _) = both(
            layer, torch.rand(8, 3, 9, 9)
        )  # within ±3: nothing is clipped
        assert same(ours, theirs)
        for name in expected:
            torch.testing.assert_close(
                gradients[name], expected[name], rtol=0.05, atol=0.02 * float(expected[name].abs().max())
            )

    def test_gradients_are_finite_whatever_γ_and_β(self):
        numbers = [0.0, 1e-44, 1e-30, 1e-3, 1.0, 1e5, -1.0, -1e-30]
        γ = torch.tensor(numbers).repeat_interleave(len(numbers))
        β = torch.tensor(numbers).repeat(len(numbers))
        layer = PreActConv2d(64, 2, 1, bits=4)
        with torch.no_grad():
            layer.norm.weight.copy_(γ)
            layer.norm.bias.copy_(β)
        (_, ours, _), _ = both(layer, torch.randn(4, 64, 5, 5))
        assert all(gradient.isfinite().all() for gradient in ours.values())


class TestKernels:
    @pytest.mark.parametrize(
        "shape", [(3, 5, 7, 9), (2, 3, 40, 40), (70, 4), (6, 130, 2, 2), (1, 1, 1, 1500), (5, 3, 1, 1)]
    )
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @slopes
    @pytest.mark.parametrize("bits", [1, 3, 4, 8])
    def test_agree_with_plain_torch(self, shape, layout, slope, bits):
        if len(shape) != 4 and layout == torch.channels_last:
            return
        x = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
        x = x.contiguous(memory_format=layout) if len(shape) == 4 else x
        C = shape[1]
        layer = PreActConv2d(C, 3, 1, bits=bits) if len(shape) == 4 else PreActLinear(C, 3, bits=bits)
        layer.negative_slope = slope
        vary(layer)
        with torch.no_grad():
            layer.norm.weight[0] = 0.0 if bits == 3 else 1.0
        (ours, gradients, _), _ = both(copy.deepcopy(layer), x)
        with patch.object(codes_module, "has_kernels", lambda x: False):
            (plain, expected, _), _ = both(layer, x)
        assert same(ours, plain)
        for name in expected:
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-5, atol=2e-6 * scale)

    def test_codes_are_those_of_the_quantizer(self):
        layer = vary(PreActConv2d(6, 5, 3, bits=3))
        A = layer.norm(torch.randn(4, 6, 9, 7)).detach()
        γ, β = layer.norm.weight.detach(), layer.norm.bias.detach()
        expected = FixedPoint(3).compress(A, scale=γ, shift=β).packed
        relu = A.relu()
        packed = codes_module.compress(A, A, γ, β, torch.zeros(6), torch.ones(6), 3, 0.0)
        assert torch.equal(packed, expected)
        assert same(A, relu)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_sums_do_not_depend_on_threads(self, threads):
        before = torch.get_num_threads()
        layer = PreActConv2d(3, 1, 1, bits=4)
        x = torch.randn(16, 3, 80, 80, generator=torch.Generator().manual_seed(0))
        try:
            torch.set_num_threads(threads)
            (_, several, _), _ = both(copy.deepcopy(layer), x)
            torch.set_num_threads(1)
            (_, one, _), _ = both(layer, x)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(several["norm.weight"], one["norm.weight"])


def test_a_relu_gate_stops_infinite_gradients():
    layer = PreActConv2d(1, 1, 1, bits=4, bias=False).eval()
    with torch.no_grad():
        layer.linear.weight.fill_(1)
    x = torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2).requires_grad_()
    layer(x).backward(torch.tensor([torch.inf, 1.0]).view(1, 1, 1, 2))
    assert x.grad.flatten()[0] == 0


def test_naive_feeds_the_approximation_forward_in_training_alone():
    layer = vary(PreActConv2d(6, 5, 3, bits=4, naive=True))
    x = torch.randn(4, 6, 9, 7)
    A = copy.deepcopy(layer).norm(x).detach()
    y = FixedPoint(4).compress(A, scale=layer.norm.weight, shift=layer.norm.bias).decompress().relu()
    torch.testing.assert_close(layer(x), layer.linear(y))
    layer.eval()
    assert same(layer(x), unfused(layer, x))


def test_second_derivatives_are_refused():
    layer = PreActLinear(3, 2)
    x = torch.randn(8, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_copies_pickles_and_compiled_functions():
    layer = vary(PreActConv2d(3, 2, 3, padding_mode="reflect", padding=1))
    x = torch.randn(4, 3, 8, 8)
    expected = unfused(copy.deepcopy(layer), x)
    assert same(pickle.loads(pickle.dumps(layer))(x), expected)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager")
    assert same(compiled(x), expected)


def test_the_meta_device_tells_the_same_bytes():
    here = fewbit.memory.profile(PreActConv2d(4, 4, 3), torch.randn(2, 4, 8, 8)).total
    with torch.device("meta"):
        assert fewbit.memory.profile(PreActConv2d(4, 4, 3), torch.randn(2, 4, 8, 8)).total == here


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 0}, "bits is an integer from 1 to 8, not 0"),
        ({"bits": 9}, "bits is an integer from 1 to 8, not 9"),
        ({"bits": None, "naive": True}, "naive needs bits"),
        ({"negative_slope": -0.1}, "negative_slope is a number not below 0, not -0.1"),
        ({"pool": nn.MaxPool2d(2)}, "folded are average poolings and nn.Flatten, not "),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(FewbitError, match=message):
        PreActConv2d(3, 4, 3, **arguments)


def test_the_state_is_that_of_its_two_modules():
    layer = PreActConv2d(3, 4, 3)
    assert sorted(layer.state_dict()) == sorted(
        [f"norm.{k}" for k in layer.norm.state_dict()] + [f"linear.{k}" for k in layer.linear.state_dict()]
    )
    assert "bits=4" in repr(layer)
