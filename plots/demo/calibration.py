"""A model ready to calibrate: the studies' transformer after some steps on its text.

`fewbit calibrate --demo` uses it, and it is an example of a TARGET of `fewbit calibrate`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import trainer
from .data import random_windows, standard_library
from .settings import Settings
from .small_networks import Transformer
from .training import adamw

SETTINGS = Settings(steps=300)
BATCHES = 8


def target(
    after_step: Callable[[], object] = lambda: None, settings: Settings = SETTINGS
) -> tuple[nn.Module, list[Tensor], Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Train a transformer with torch's own GELU on the CPU and return the arguments of `fewbit.calibrate`.

    Args:
        after_step: called after every step, for a progress bar.
        settings: training settings.

    Returns:
        The model; batches of windows of text, int64 (16, 65), that it was not trained on; the loss of predicting each
        character from those before it; a function from a batch to the model's input.
    """
    text = standard_library()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Transformer(settings.size, nn.GELU)
    draw = torch.Generator().manual_seed(settings.seed)
    batches = (
        random_windows(text.training, settings.batch, settings.size.context, draw) for _ in range(settings.steps)
    )
    trainer.train([adamw(model, settings)], batches, after_step)
    held_out = [random_windows(text.validation, settings.batch, settings.size.context, draw) for _ in range(BATCHES)]
    return model, held_out, _loss, _all_but_the_last


def _loss(scores: Tensor, windows: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def _all_but_the_last(windows: Tensor) -> Tensor:
    return windows[:, :-1]
