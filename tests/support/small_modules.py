"""Modules as models have them, small, and whether two models are alike."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    """A gated MLP with the names and the operations of Llama's."""

    def __init__(self, hidden=32, inner=96, bias=True, act=nn.SiLU):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=bias), nn.Linear(hidden, inner, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=bias), act()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attends(nn.Module):
    """Attention over 64 features: causal, grouped queries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(64, 64)

    def forward(self, x, scale=2.0):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q * scale, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def llama(hidden=64, inner=128, layers=2, words=256, heads=4, **more):
    """A Llama of transformers, with what else its configuration is to say."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=heads, **more))


def check_same(model, original, x):
    """Outputs, running statistics and names are those of the original, in training and in evaluation mode."""
    original.load_state_dict(model.state_dict())  # of the passes that one of them had alone
    for training in (False, True):
        outputs = []
        for one in (model, original):
            one.train(training)
            torch.manual_seed(1)
            outputs.append(one(x))
        assert torch.equal(*outputs)
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), original.state_dict().values()))
