"""LSTM language models of words with few-bit weights (V-Quant, Section 5.3 and Table 6).

    rows = table(progress)       word-level perplexity of a small and a large model, 2 to 4 bits, 1 and 3 %

The words are those of Python's standard library: identifiers, numbers and signs. Only weights are quantized, after
training and without fine-tuning, as in the paper: embedding, LSTM and output layer.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.inference.vquant import pack, quantize
from ..demo import trainer
from ..demo.data import library_words
from ..demo.small_networks import WordLSTM
from ..demo.trainer import Trainee, next_character

VOCABULARY = 2000


@dataclass(frozen=True)
class Settings:
    """Training settings of the models.

    Attributes:
        sizes: hidden units of each model, by name; each has two layers.
        steps: of Adam, each on `batch` windows of `context` words.
        characters: of the corpus.
        validation_words: words on which the perplexity is measured.
    """

    sizes: tuple[tuple[str, int], ...] = (("small", 96), ("large", 256))
    steps: int = 300
    batch: int = 16
    context: int = 32
    learning_rate: float = 4e-3
    characters: int = 1_500_000
    validation_words: int = 16_384


def train(model: nn.Module, text: Tensor, settings: Settings, progress: Callable[[], object]) -> None:
    """Train `model` in place."""
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps)
    generator = torch.Generator().manual_seed(0)
    within = torch.arange(settings.context + 1)

    def window() -> Tensor:
        return text[torch.randint(len(text) - settings.context - 1, (settings.batch, 1), generator=generator) + within]

    trainee = Trainee(model, next_character, optimizer, rates, largest_gradient=1.0)
    trainer.train([trainee], (window() for _ in range(settings.steps)), progress)


@torch.no_grad()
def perplexity(model: nn.Module, text: Tensor, length: int = 128) -> float:
    """Return the perplexity of `text`, read in windows of `length` words with a fresh state each."""
    model.eval()
    usable = (len(text) - 1) // length * length
    before, after = text[:usable].view(-1, length), text[1 : usable + 1].view(-1, length)
    losses = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        for x, y in zip(before.split(16), after.split(16), strict=True)
    ]
    sizes = [len(part) for part in before.split(16)]
    return math.exp(sum(float(loss) * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes))


def table(settings: Settings = Settings(), progress: Callable[[], object] = lambda: None) -> list[dict[str, Any]]:
    """Return Table 6: a row for each model, number of bits and ratio, the first of each model in full precision."""
    training, validation = library_words(settings.characters, VOCABULARY)
    validation = validation[: settings.validation_words]
    rows = []
    for name, hidden in settings.sizes:
        torch.manual_seed(0)
        model = WordLSTM(VOCABULARY, hidden)
        train(model, training, settings, progress)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        found = perplexity(model, validation)
        rows.append(_row(name, hidden, None, 0.0, found, whole))
        for bits in (2, 3, 4):
            for ratio in (0.01, 0.03):
                packed = pack(quantize(copy.deepcopy(model), bits, ratio, None))
                size = sum(t.numel() * t.element_size() for t in (*packed.parameters(), *packed.buffers()))
                rows.append(_row(name, hidden, bits, ratio, perplexity(packed, validation), size))
    return rows


def _row(model: str, hidden: int, bits: int | None, ratio: float, found: float, size: int) -> dict[str, Any]:
    return {"model": model, "hidden": hidden, "bits": bits, "ratio": ratio, "perplexity": found, "bytes": size}
