"""The small networks that the studies train; the large networks of other papers, not trained here, are in networks.py.

        resnet               digits of 8×8 pixels -> ten classes
        Transformer          characters -> the next one, in plain torch.nn
        EncoderTransformer   the same, with torch's own encoder layers and dropout
        GPT2, Llama          the same, models of `transformers` built from a configuration without a download
        BERT                 characters, some of them masked -> each of them, likewise
        ViT                  square grey images -> ten classes, likewise
        WordLSTM             words -> the next one

BLPA's network is `fewbit.runtime.models.preact_resnet`.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import FewbitError
from .data import VOCABULARY
from .settings import Size

CLASSES = 10


# ---- images ----------------------------------------------------------------------------------------------------------


def resnet(
    activation: Callable[[], nn.Module],
    blocks: Sequence[tuple[int, int]] = ((16, 1), (16, 1), (32, 2), (32, 1)),
    layers: Any = nn,
    **options: Any,
) -> nn.Sequential:
    """Return a network from grey images (n, 1, height, width) to scores of the ten classes, (n, 10).

        stem    convolution 3×3, norm, activation
        block   shortcut(x) + norm(conv(activation(norm(conv(x))))), activation
        head    average over the image, Linear

    As in He et al. (2016) for CIFAR, with fewer blocks; any activation may replace ReLU.

    Args:
        activation: constructs an activation, such as ``torch.nn.ReLU``.
        blocks: channels and stride of each; the stem has the channels of the first.
        layers: module that provides Conv2d, BatchNorm2d and Linear, such as ``fewbit.layers``.
        options: further arguments of each `Block`.
    """
    before = blocks[0][0]
    body = [layers.Conv2d(1, before, 3, padding=1, bias=False), layers.BatchNorm2d(before), activation()]
    for channels, stride in blocks:
        body.append(Block(before, channels, stride, activation, layers, **options))
        before = channels
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), layers.Linear(before, CLASSES))


class Block(nn.Module):
    """Two convolutions beside a shortcut.

    Args:
        before, after: channels of input and output.
        stride: of the first convolution and the shortcut.
        activation, layers: see `resnet`.
        normed: whether a convolution in the shortcut is followed by normalization.
        shortcut_first: whether the shortcut is computed before the convolutions. It changes no value, only which random
            numbers the compressed layers draw.
    """

    def __init__(
        self,
        before: int,
        after: int,
        stride: int,
        activation: Callable[[], nn.Module],
        layers: Any = nn,
        *,
        normed: bool = True,
        shortcut_first: bool = True,
    ) -> None:
        super().__init__()
        self.shortcut_first = shortcut_first
        self.conv1 = layers.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = layers.BatchNorm2d(after)
        self.activation1 = activation()
        self.conv2 = layers.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = layers.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = layers.Conv2d(before, after, 1, stride, bias=False)
            if normed:
                self.shortcut = nn.Sequential(self.shortcut, layers.BatchNorm2d(after))
        self.activation2 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after this block."""
        if self.shortcut_first:
            return self.activation2(self.shortcut(x) + self._around(x))
        return self.activation2(self._around(x) + self.shortcut(x))

    def _around(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.activation1(self.bn1(self.conv1(x)))))


# ---- text ------------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A decoder in plain torch.nn that gives scores for the next character after each one.

    Args:
        size: of the model.
        activation: constructs the activation of one MLP, such as ``torch.nn.GELU``.
    """

    def __init__(self, size: Size, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(TransformerBlock(size, activation) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.score = nn.Linear(size.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, 128), float32, for ASCII codes (batch, length), int64; length ≤ context."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.character(text) + self.position(positions)
        return self.score(self.norm(self.blocks(x)))


class TransformerBlock(nn.Module):
    """Attention and MLP with pre-normalization and residual connections; (batch, length, width) to the same."""

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
    """Causal self-attention; (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention."""
        # (batch, length, 3·width) -> three of (batch, heads, length, width/heads)
        queries, keys, values = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.merge(found.transpose(1, 2).flatten(2))


class EncoderTransformer(nn.Module):
    """Scores for the next character, by torch's own encoder layers with a causal mask."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        layers = (
            nn.TransformerEncoderLayer(
                *(size.width, size.heads, 4 * size.width, 0.1, nn.GELU()), batch_first=True, norm_first=True
            )
            for _ in range(size.depth)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(size.width)
        self.score = nn.Linear(size.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, 128) for ASCII codes (batch, length)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.character(text) + self.position(torch.arange(length, device=text.device))
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.score(self.norm(x))


class OfTransformers(nn.Module):
    """A causal model of `transformers` that gives scores for the next character after each one.

    Args:
        name: display name of the model, for a message.
        model, configuration: class names.
        vocabulary: number of characters or tokens.
        options: arguments of the configuration.

    Raises:
        FewbitError: `transformers` is not installed.
    """

    def __init__(self, name: str, model: str, configuration: str, vocabulary: int = VOCABULARY, **options: Any) -> None:
        super().__init__()
        self.model = _of_transformers(
            *(name, model, configuration),
            vocab_size=vocabulary,
            bos_token_id=None,  # those of the trained models are outside this vocabulary
            eos_token_id=None,
            use_cache=False,
            **options,
        )

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, vocabulary) for codes (batch, length), int64; length ≤ context."""
        return self.model(text).logits


def _of_transformers(name: str, model: str, configuration: str, **options: Any) -> Any:
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise FewbitError(f"training {name} needs transformers: pip install transformers") from error
    return getattr(transformers, model)(getattr(transformers, configuration)(**options))


class GPT2(OfTransformers):
    """GPT-2 of a given size. Its activation is `gelu_new`, GELU by tanh in several torch calls that save four tensors.

    Dropout is 0, so that a few-bit run differs from the exact one by the derivative only.
    """

    def __init__(self, size: Size) -> None:
        dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": size.context, "n_embd": size.width, "n_layer": size.depth, "n_head": size.heads}
        super().__init__("GPT-2", "GPT2LMHeadModel", "GPT2Config", **sizes, **dropout)


class Llama(OfTransformers):
    """Llama of a given size; its MLP has 8/3 of the width."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            *("a Llama", "LlamaForCausalLM", "LlamaConfig"),
            max_position_embeddings=size.context,
            hidden_size=size.width,
            intermediate_size=round(size.width * 8 / 3),
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
        )


class BERT(OfTransformers):
    """BERT of a given size without dropout: scores for every character from all characters."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            *("BERT", "BertForMaskedLM", "BertConfig"),
            max_position_embeddings=size.context,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )


class ViT(nn.Module):
    """A vision transformer of a given size: scores (n, 10) of grey images (n, 1, pixels, pixels).

    Args:
        size: of the model; its context is not used.
        pixels: height and width of an image.
        patch: height and width of a patch, which divides `pixels`.
    """

    def __init__(self, size: Size, pixels: int, patch: int) -> None:
        super().__init__()
        self.model = _of_transformers(
            *("a vision transformer", "ViTForImageClassification", "ViTConfig"),
            image_size=pixels,
            patch_size=patch,
            num_channels=1,
            num_labels=CLASSES,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.model(images).logits


class WordLSTM(nn.Module):
    """A word language model: embedding, two LSTM layers, output.

    Args:
        vocabulary: number of words.
        hidden: units of each layer.
    """

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (n, length, vocabulary) of the words that follow `words`, int64 (n, length)."""
        return self.output(self.lstm(self.embedding(words))[0])
