"""Rows of zeros are exact, whatever multiplies them: padding tokens, normalized queries and keys, hidden sizes."""

import copy

import fewbit
import pytest
import torch
from fewbit import layers
from fewbit.quantizers import Outlier, PerGroup
from fewbit.runtime.quantizers.per_group import group_within
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = (64, 80, 96, 100, 128, 192, 257, 320, 768, 1021, 1024, 2304, 4096)
METHODS = {
    "L2": {"level": "L2"},
    "L2, 1 bit": {"level": "L2", "bits": 1},
    "L3": {"level": "L3", "bits": 2},
    "V-Quant": {"outliers": 0.02, "bits": 3},
    "V-Quant, 1 bit": {"outliers": 0.0, "bits": 1},
}


class TestGroups:
    @given(st.integers(1, 10_000), st.sampled_from([1, 8, 32, 64, 100, 256, 1024]))
    def test_do_not_reach_over_rows_of_64_and_more(self, features, most):
        size = group_within(features, most)
        if features >= min(64, most):
            assert features % size == 0
        else:
            assert size % features == 0
            assert size <= max(most, features)

    @pytest.mark.parametrize(
        ("features", "size"),
        [(32, 64), (10, 80), (48, 96), (64, 64), (96, 96), (100, 100), (768, 256), (384, 192), (1000, 200), (257, 257)],
    )
    def test_are_as_large_as_rows_allow(self, features, size):
        assert PerGroup(4).within(features) == PerGroup(4, size)

    @pytest.mark.parametrize(("features", "bits"), [(64, 0.5), (96, 1 / 3), (128, 0.25), (768, 0.125), (4096, 0.125)])
    def test_cost_at_most_half_a_bit_an_element(self, features, bits):
        saver = layers.QuantizerSaver(PerGroup(4))
        assert saver.compress_rows(torch.randn(16, features)).nbytes * 8 == 16 * features * (4 + bits)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("features", SIZES)
def test_rows_of_zeros_come_back_as_zeros(features, bits):
    torch.manual_seed(features)
    x = torch.randn(3, 5, features) * torch.exp2(torch.randint(-10, 10, (3, 5, 1)).float())
    x[1, 2:4] = 0
    y = layers.QuantizerSaver(PerGroup(bits)).compress_rows(x).decompress()
    assert (y[1, 2:4] == 0).all()
    outliers = Outlier(bits, 0.02).compress(x).decompress()
    assert (outliers[x == 0] == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("features", (64, 96, 768))
def test_a_token_of_zeros_adds_nothing_to_the_gradient_of_a_weight(features, method):
    """The gradient of the token alone is large: the error of a code times that was the gradient."""
    model = nn.Sequential(nn.Linear(features, features, bias=False), nn.Linear(features, 8))
    fewbit.convert(model, **METHODS[method])
    x = torch.randn(2, 16, features)
    x[0, 3] = 0
    g = torch.zeros(2, 16, 8)
    g[0, 3] = 1000
    for _ in range(2):  # mixed precision has seen gradients in the second
        model.zero_grad()
        model(x.clone().requires_grad_()).backward(g)
        assert (model[0].weight.grad == 0).all()


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("method", ["L2", "L3", "V-Quant"])
def test_normalized_rows_of_zeros_get_the_exact_gradient(norm, method):
    """1/deviation of a row of zeros is 1/√ε: a thousand times what multiplies the rounding of other rows."""
    exact = nn.Sequential(nn.Linear(64, 64), getattr(nn, norm)(64, eps=1e-6), nn.Linear(64, 64))
    converted = copy.deepcopy(exact)
    fewbit.convert(converted, **METHODS[method])
    nn.init.zeros_(exact[0].bias)
    nn.init.zeros_(converted[0].bias)
    x, g = torch.randn(4, 8, 64), torch.randn(4, 8, 64)
    x[2, :3] = 0
    found = []
    for model in (exact, converted):
        given_x = x.clone().requires_grad_()
        model(given_x).backward(g)
        found.append(given_x.grad)
    if method != "V-Quant":  # which leaves normalizations alone
        assert torch.allclose(found[1][2, :3], found[0][2, :3], rtol=1e-4)
    others = [grad.flatten(0, 1)[[i for i in range(32) if not 16 <= i < 19]] for grad in found]
    assert (others[1] - others[0]).norm() / others[0].norm() < 0.5


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "bound"), [("L2", 0.3), ("L3", 1.5), ("V-Quant", 0.6)])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_padding_token_does_not_drown_the_gradient_of_queries(head_dim, method, bound):
    """Qwen3 normalizes queries and keys. The errors here were 1.7 to 34 times the gradient."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(
        vocab_size=64, num_hidden_layers=2, head_dim=head_dim, pad_token_id=0, use_cache=False, **sizes
    )
    exact = Qwen3ForCausalLM(config)
    with torch.no_grad():
        exact.get_input_embeddings().weight[0] = 0
    ids = torch.randint(1, 64, (2, 128))
    ids[0, 100] = 0  # and not masked
    converted = copy.deepcopy(exact)
    fewbit.convert(converted, **METHODS[method])
    errors = []
    for _ in range(3):
        gradients = []
        for model in (exact, converted):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            gradients.append([p.grad.clone() for n, p in model.named_parameters() if "q_proj" in n])
        errors.append(max(float((b - a).norm() / a.norm()) for a, b in zip(*gradients, strict=True)))
    assert min(errors) < bound, errors
