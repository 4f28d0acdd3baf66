"""Modules as models have them, small: a gated MLP with the names of Llama's, and attention in plain torch."""

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
