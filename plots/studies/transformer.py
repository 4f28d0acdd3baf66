"""A small decoder-only transformer over characters, in plain torch.nn; its activation is what the experiments vary.

x = x + attention(norm(x))          pre-norm
x = x + mlp(norm(x))                mlp = Linear, activation, Linear
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .settings import Size
from .text import VOCABULARY


class Transformer(nn.Module):
    """Scores for the next character after each one.

    Args:
        size: of the model.
        activation: makes the activation of one MLP, such as ``torch.nn.GELU``.
    """

    def __init__(self, size: Size, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size, activation) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.score = nn.Linear(size.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, 128), float32, for ASCII codes (batch, length), int64; length ≤ context."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.character(text) + self.position(positions)
        return self.score(self.norm(self.blocks(x)))


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of what it is added to; (batch, length, width) to the same."""

    def __init__(self, size: Size, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = CausalAttention(size.width, size.heads)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            activation(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CausalAttention(nn.Module):
    """Each character looks at itself and those before it; (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what was looked up."""
        # (batch, length, 3·width) -> three of (batch, heads, length, width/heads)
        queries, keys, values = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.merge(found.transpose(1, 2).flatten(2))
