"""Training of a Llama with its gated MLPs in few bits beside exact training, with the same weights and batches.

    train([EXACT, *VARIANTS], standard_library(), SETTINGS, Llama)

The variants are `fewbit.convert(model, glu=...)` of the model of `transformers`: at the default bits, with the fewest
bits, and with the input of each block in four bits besides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.convert.api import convert
from ..demo import trainer
from ..demo.data import random_windows, standard_library
from ..demo.settings import Settings, Size
from ..demo.small_networks import Llama
from ..demo.trainer import Trainee, next_character
from ..demo.training import Variant

# The learning rate is that of the GPT-2 study.
SETTINGS = Settings(
    steps=300, learning_rate=3e-3, size=Size(width=96, depth=3, heads=4, context=64), validation_windows=512
)


def gated(name: str, **glu: Any) -> Variant:
    """Return the variant whose gated MLPs are converted with the options `glu`."""
    return Variant(name, prepare=partial(convert, glu=glu, include="model.model.layers.*.mlp"))


VARIANTS = (
    gated("parts 3+4+4"),
    gated("inputs 4+4", keep="inputs"),
    gated("parts, x in 4", input_bits=4),
)


def trained(steps: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a Llama of gated MLPs after `steps` steps of exact training, and its loss on one more batch.

    The same model in each process: two that drew their weights anew differed threefold in what rounding does to them.
    """
    corpus = standard_library()
    torch.manual_seed(0)
    model = Llama(SETTINGS.size)
    convert(model, glu="exact", include="model.model.layers.*.mlp")
    optimizer = torch.optim.AdamW(model.parameters(), SETTINGS.learning_rate)
    draw = torch.Generator().manual_seed(0)

    def batch() -> Tensor:
        return random_windows(corpus.training, SETTINGS.batch, SETTINGS.size.context, draw)

    trainee = Trainee(model, next_character, optimizer, largest_gradient=SETTINGS.largest_gradient)
    trainer.train([trainee], (batch() for _ in range(steps)))
    last = batch()
    return model, lambda model: next_character(model, last)
