"""Layers whose gradient is exact whatever few bits they keep: dropout, pooling, resampling."""

from types import SimpleNamespace

import pytest
import torch
from fewbit import layers, memory
from fewbit.runtime.layers.dropout import ListedDropout, PackedDropout
from layer_cases import EXACT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

each = pytest.mark.parametrize("case", EXACT, ids=str)


def run(layer, x, g=None, **call):
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = layer(leaf, **call)
    if g is None:
        torch.manual_seed(6)
        g = torch.randn_like(y)
    return y.detach(), torch.autograd.grad(y, leaf, g)[0]


@pytest.mark.sample(24)
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_output_and_gradient_are_torchs(case, dtype, training):
    if dtype == torch.bfloat16 and case.name.endswith("Pool3d"):
        pytest.skip("windows of MaxPool3d overlap, and sums depend on their order; torch has no such AvgPool3d")
    x = case.input().to(dtype)
    ours, torchs = (run(layer.train(training), x) for layer in (case.compressed(), case.torchs()))
    assert torch.equal(ours[0], torchs[0])
    # Torch multiplies by noise that is rounded to bfloat16, or adds in another order: a few last places.
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(ours[1], torchs[1], rtol=tolerance, atol=tolerance)


@each
def test_any_layout_will_do(case):
    x = case.input()
    layouts = [torch.stack([x, x], -1)[..., 0], x.transpose(0, 1).contiguous().transpose(0, 1)]
    if x.dim() == 4:
        layouts.append(x.contiguous(memory_format=torch.channels_last))
    for same in layouts:
        ours, torchs = run(case.compressed(), same), run(case.torchs(), same)
        assert torch.equal(ours[0], torchs[0])
        torch.testing.assert_close(ours[1], torchs[1], rtol=1e-6, atol=1e-6)


class _Scattering(TorchDispatchMode):
    """Records the dtype in which numbers are added at places."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.scatter_add_.default:
            self.dtype = args[0].dtype
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_summed_in_float32(dtype):
    """A GPU's `scatter_add_` rounds each sum in their dtype; that of a CPU does not."""
    x = torch.randn(2, 3, 9, 9, dtype=dtype)
    with _Scattering() as found:
        _, gradient = run(layers.MaxPool2d(3, 1), x)
    assert found.dtype == torch.float32 and gradient.dtype == dtype


@each
def test_checkpoints_work(case):
    x, layer = case.input(), case.compressed()
    for a, b in zip(run(layer, x), run(lambda x: checkpoint(layer, x, use_reentrant=False), x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layer", [layers.Dropout(), layers.MaxPool2d(2), layers.AvgPool2d(2), layers.Upsample(3)])
def test_second_derivatives_are_refused(layer):
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


class TestBytes:
    def test_dropout_keeps_a_bit_an_element(self):
        x = torch.randn(4, 1000, requires_grad=True)
        assert memory.profile(layers.Dropout(0.1), x).total == 500
        assert memory.profile(nn.Dropout(0.1), x).total == 16_000

    def test_max_pooling_keeps_a_byte_an_output(self):
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        for window in (2, 4):
            assert memory.profile(layers.MaxPool2d(window), x).total == 2 * 3 * (8 // window) ** 2

    def test_average_pooling_and_resampling_keep_nothing(self):
        for case in EXACT:
            if case.name.startswith(("Avg", "Adaptive", "Upsample")):
                x = case.input().requires_grad_()
                assert memory.profile(case.compressed(), x).total == 0

    def test_a_window_too_large_for_a_byte_keeps_what_torch_keeps(self):
        x = torch.randn(1, 2, 20, 20, requires_grad=True)
        kept = [memory.profile(layer(17, stride=1), x).total for layer in (layers.MaxPool2d, nn.MaxPool2d)]
        assert kept[0] == kept[1]
        assert memory.profile(layers.MaxPool2d(16, stride=1), x).total == 2 * 5 * 5

    def test_indices_that_are_asked_for_are_torchs(self):
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        ours, torchs = (pool(2, return_indices=True)(x) for pool in (layers.MaxPool2d, nn.MaxPool2d))
        assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


class Draws(TorchDispatchMode):
    """Collects the operators that draw random numbers."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.operators.append(func)
        return func(*args, **(kwargs or {}))


class TestDropout:
    def test_in_place_overwrites_its_input(self):
        x = torch.randn(4, 30, requires_grad=True)
        outs = []
        for layer in (layers.Dropout(0.5, inplace=True), nn.Dropout(0.5, inplace=True)):
            middle = x * 2
            torch.manual_seed(0)
            y = layer(middle)
            assert y is middle or y.data_ptr() == middle.data_ptr()
            outs.append([y, *torch.autograd.grad(y.square().sum(), x)])
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))

    @pytest.mark.parametrize("inplace", [False, True])
    def test_a_gpu_draws_by_the_operators_that_torch_draws_by(self, inplace):
        """In place by another one, and so other numbers."""
        nothing = SimpleNamespace(mark_dirty=id, save_for_backward=id, mark_non_differentiable=id)
        drawn = []
        for run in (
            lambda x: nn.functional.dropout(x, 0.5, True, inplace),
            lambda x: PackedDropout.forward(nothing, x, 0.5, inplace),
            lambda x: ListedDropout.forward(nothing, x, 0.5, inplace),
        ):
            with FakeTensorMode(), Draws() as draws:
                run(torch.empty(8, 8, device="cuda"))
            drawn.append(draws.operators)
        assert drawn[0] and drawn[1:] == drawn[:1] * 2

    def test_what_was_zero_and_kept_has_a_gradient(self):
        x = torch.zeros(1000, requires_grad=True)
        layers.Dropout(0.25)(x).sum().backward()
        assert torch.equal(x.grad.unique(), torch.tensor([0, 4 / 3]))


def test_the_place_of_a_nan_is_torchs():
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 3, 3] = torch.nan
    for a, b in zip(run(layers.MaxPool2d(3), x), run(nn.MaxPool2d(3), x), strict=True):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))
