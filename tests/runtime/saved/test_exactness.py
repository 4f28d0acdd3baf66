"""What must not be rounded, by function and history: of each class cases that the table of operators does not have."""

from contextlib import nullcontext

import fewbit
import pytest
import torch
from fewbit import compress_saved_tensors
from fewbit.quantizers import PerGroup
from fewbit.runtime.saved.exactness import of_parameters, rule_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm


def inputs(*shape):
    return torch.randn(*(shape or (64, 64)), generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradient(function, x, context=None):
    with context or nullcontext():
        y = function(x * 1.0)
    (found,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return found


def bytes_of(function, x, context=None):
    """Bytes that autograd keeps; `x` itself is a result of an op, which nothing else holds."""
    h = x * 1.0
    with context or nullcontext():
        return fewbit.memory.profile_call(nn.Module(), lambda: function(h)).total


TIES = torch.tensor([[3.0, 3.0, 1.0, -2.0] * 16] * 64)
IMAGE = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(64).expand(64, 64) % 16


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax((0, 1)),
        lambda x: x - x.amin(-1, keepdim=True),
        lambda x: torch.aminmax(x, dim=0).min,
        lambda x: torch.maximum(x, x.T),
        lambda x: torch.fmin(x, x.flip(0)),
        lambda x: torch.max(x, x.T),
        lambda x: torch.minimum(x, x[:1]),
        lambda x: x.max() + x.min() + x.median(),
        lambda x: torch.zeros(64, 16).scatter_reduce(1, INDEX, x, "amax", include_self=False),
        lambda x: torch.zeros(16, 64).index_reduce(0, INDEX[0], x, "amin", include_self=False),
        lambda x: torch.segment_reduce(x, "min", lengths=torch.tensor([20, 44])),
        lambda x: torch.ops.aten.amax.default(x, [1]),
        lambda x: torch.clamp(x, min=x.T, max=None),
        lambda x: torch.fmod(x, x.T + 3),
        lambda x: F.grid_sample(IMAGE, x.view(1, 32, 64, 2).tanh(), align_corners=False),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_choices_are_those_of_the_exact_values(function, ties):
    x = TIES.clone().requires_grad_() if ties else inputs()
    exact, found = gradient(function, x), gradient(function, x, compress_saved_tensors(PerGroup(2)))
    assert torch.equal(found, exact)


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        (lambda x: x.abs(), 2),
        (lambda x: x.clamp(-1, 0.5), 1),
        (lambda x: torch.clip(x, max=0.25), 1),
        (lambda x: torch.clamp_min(x, 0), 1),
        (lambda x: F.threshold(x, 0.1, 20), 1),
        (lambda x: F.hardshrink(x, 0.3), 1),
        (F.softshrink, 1),
        (F.hardsigmoid, 1),
        (lambda x: F.rrelu(x, training=False), 33),  # and its noise, whole
    ],
)
def test_sides_of_bounds_are_exact_in_bits(function, bits):
    special = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 0.5, 0.25, -1.0, 0.1, 0.3, -0.3, 3.0, -3.0, torch.inf, -torch.inf])
    with torch.no_grad():
        x = torch.cat([inputs().flatten() * 3, special]).requires_grad_()
    assert torch.equal(gradient(function, x, compress_saved_tensors(PerGroup(1))), gradient(function, x))
    assert bytes_of(function, inputs(), compress_saved_tensors(PerGroup(8))) == bits * 64 * 64 // 8


@pytest.mark.parametrize("function", [lambda x: F.prelu(x, torch.full((1,), -0.5)), F.selu, lambda x: F.elu(x, 3.0)])
def test_signs_survive_where_the_gradient_jumps(function):
    x = inputs()
    exact, found = gradient(function, x), gradient(function, x, compress_saved_tensors(PerGroup(3)))
    assert (found - exact).abs().max() < 0.6 * exact.abs().max()
    assert bytes_of(function, x, compress_saved_tensors(PerGroup(3))) < 0.2 * bytes_of(function, x)
    if function is not F.selu:
        near = x.detach().abs() < 0.02  # where 3 bits would flip half of the signs
        assert torch.allclose(found[near], exact[near], atol=0.3 * float(exact.abs().max()))


def test_steep_sines_keep_their_angle():
    x = inputs()
    for function in (lambda v: torch.sin(30 * v), lambda v: torch.cat([torch.sin(50 * v), torch.cos(50 * v)])):
        exact, found = gradient(function, x), gradient(function, x, compress_saved_tensors(PerGroup(4)))
        assert (found - exact).norm() < 0.3 * exact.norm()


def test_sine_and_cosine_of_one_tensor_share_its_angle():
    def both(h):
        return h.sin() * 1 + h.cos()

    with torch.no_grad():
        x = (inputs() * 50).requires_grad_()
    assert bytes_of(both, x, compress_saved_tensors(PerGroup(8))) < 0.3 * bytes_of(both, x)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_normalizations_of_few_numbers_are_exact(size):
    for function in (
        lambda x: F.layer_norm(x, (size,)),
        lambda x: F.rms_norm(x, (size,)),
        lambda x: F.group_norm(x.view(-1, size), 1),
        lambda x: F.instance_norm(x.view(-1, 2, size)) if size > 1 else x,
    ):
        x = inputs(512, size)
        assert torch.equal(
            gradient(function, x, compress_saved_tensors(PerGroup(2), smallest=1)), gradient(function, x)
        )


class TestWeights:
    """What is computed of parameters alone is exact."""

    @pytest.mark.parametrize(
        "wrap",
        [
            parametrizations.weight_norm,
            parametrizations.spectral_norm,
            parametrizations.orthogonal,
            spectral_norm,
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        ],
    )
    @pytest.mark.parametrize("layer", [lambda: nn.Linear(64, 64), lambda: nn.Conv1d(64, 64, 1)])
    def test_gradients_of_inputs_are_exact(self, wrap, layer):
        net = wrap(layer())
        net.eval()
        x = inputs(64, 64, 1) if isinstance(net, nn.Conv1d) else inputs()
        assert torch.equal(gradient(net, x, compress_saved_tensors(PerGroup(2))), gradient(net, x))

    def test_merged_adapters_are_weights(self):
        weight, down, up = (nn.Parameter(torch.randn(64, 64)) for _ in range(3))
        x = inputs()
        call = lambda v: v @ (weight + up @ down.tanh())  # noqa: E731
        assert torch.equal(gradient(call, x, compress_saved_tensors(PerGroup(2))), gradient(call, x))

    def test_activations_of_an_input_without_gradient_are_none(self):
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        x, table, scale = torch.randn(64, 64), nn.Embedding(100, 64), nn.Parameter(torch.ones(64))
        for h in (net(x), table(torch.arange(64)), x * scale, x + scale, table.weight[torch.arange(8)].tanh()):
            assert not of_parameters(h)
        latents = nn.Parameter(torch.randn(8, 64))
        assert not of_parameters(latents.expand(4, 8, 64) * scale)

    def test_other_leaves_are_data(self):
        x = inputs()
        assert not of_parameters(x * 2)
        assert of_parameters(nn.Parameter(torch.ones(3)) * 2)


class TestOnce:
    """A piece of memory never takes more than torch keeps of it."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda h: h / h.norm(dim=-1, keepdim=True),
            lambda h: h.sin().sum() + h.log_softmax(-1).sum() + h.amax(-1).sum(),  # in codes first
            lambda h: h.exp() + h.abs().sqrt(),
            lambda h: sum((h.flatten()[i : i + 3900]).sin().sum() for i in range(24)),
            lambda h: sum(h[:, i : i + 40].exp().sum() for i in range(20)),
            lambda h: sum(row.norm() for row in h) + h.sum(),
            lambda h: h.unsqueeze(-1) * h.unsqueeze(-2),
            lambda h: sum(h.unsqueeze(0).expand(i, 64, 64).sin().sum() for i in range(2, 12)),
        ],
    )
    def test_never_more_bytes_than_torch(self, function):
        x = inputs()
        exact, found = gradient(function, x), gradient(function, x, compress_saved_tensors(PerGroup(8), smallest=16))
        assert (found - exact).norm() < 0.05 * exact.norm()
        assert bytes_of(function, x, compress_saved_tensors(PerGroup(8), smallest=16)) <= bytes_of(function, x)

    def test_a_small_part_does_not_hold_the_whole(self):
        x = inputs(16, 50, 64)
        call = lambda h: h[:, 0, :8].norm() + h.sin().sum()  # noqa: E731
        assert bytes_of(call, x, compress_saved_tensors(PerGroup(8))) < 0.3 * bytes_of(call, x)

    def test_what_went_over_to_exact_still_sees_changes_in_place(self):
        h = inputs() * 1
        with compress_saved_tensors(PerGroup(8)):
            y = h.sin().sum() + h.square().sum().sqrt() + h.norm()
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_jagged_tensors_take_torchs_path():
    linear = nn.Linear(32, 32)
    rows = torch.nested.nested_tensor_from_jagged(torch.randn(2000, 32), torch.tensor([0, 600, 1100, 2000]))
    found = []
    for context in (nullcontext(), compress_saved_tensors(PerGroup(4))):
        linear.zero_grad()
        with context:
            q = linear(rows).unflatten(-1, [2, 16]).transpose(1, 2)
            y = F.layer_norm(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2), (32,))
        y.values().square().sum().backward()
        found.append(linear.weight.grad.clone())
    assert torch.isfinite(found[1]).all() and (found[1] - found[0]).norm() < 0.3 * found[0].norm() + 1e-3


def test_operators_of_torch_ops_go_by_their_function():
    assert rule_of(torch.ops.aten.log.default, (), {}).exact
    assert rule_of(torch.ops.aten.add.Tensor, (), {}) == rule_of(torch.add, (), {})
