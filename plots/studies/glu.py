"""Does a Llama train as well with its gated MLPs in few bits? The same weights and batches, exactly and not.

    train([EXACT, *VARIANTS], standard_library(), SETTINGS, Llama)

What is compared is what `fewbit.convert(model, glu=...)` does to the model of `transformers`: at the default bits, in
the leanest way, and with the input of each block in four bits besides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.convert.api import convert
from ...tables import FewbitError
from .settings import Settings, Size
from .text import VOCABULARY, standard_library
from .training import Variant, loss_of, random_windows

# The learning rate is that of the GPT-2 study.
SETTINGS = Settings(
    steps=300, learning_rate=3e-3, size=Size(width=96, depth=3, heads=4, context=64), validation_windows=512
)
INTERMEDIATE = 8 / 3  # times the width, as in Llama


class Llama(nn.Module):
    """Scores for the next character after each one, by `transformers.LlamaForCausalLM`.

    Args:
        size: of the model; the MLP has 8/3 of its width.

    Raises:
        FewbitError: `transformers` is not installed.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        transformers = _transformers()
        configuration = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=size.context,
            hidden_size=size.width,
            intermediate_size=round(size.width * INTERMEDIATE),
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(configuration)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, 128), float32, for ASCII codes (batch, length), int64; length ≤ context."""
        return self.model(text).logits


def gated(name: str, **glu: Any) -> Variant:
    """Return the variant whose gated MLPs keep what `glu` says."""
    return Variant(name, prepare=partial(convert, glu=glu, include="model.model.layers.*.mlp"))


VARIANTS = (
    gated("parts 3+4+4"),
    gated("inputs 4+4", keep="inputs"),
    gated("parts, x in 4", input_bits=4),
)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise FewbitError("training a Llama needs transformers: pip install transformers") from error
    return transformers


def trained(steps: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a Llama of gated MLPs after `steps` steps of exact training, and its loss on one more batch."""
    corpus = standard_library()
    model = Llama(SETTINGS.size)
    convert(model, glu="exact", include="model.model.layers.*.mlp")
    optimizer = torch.optim.AdamW(model.parameters(), SETTINGS.learning_rate)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss_of(model, random_windows(corpus.training, SETTINGS.batch, SETTINGS.size.context, draw)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.largest_gradient)
        optimizer.step()
        optimizer.zero_grad()
    batch = random_windows(corpus.training, SETTINGS.batch, SETTINGS.size.context, draw)
    return model, lambda model: loss_of(model, batch)
