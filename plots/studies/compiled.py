"""Training of GPT-2 and Llama under `torch.compile` with few bits between the passes. Paired seeds, one run at a time.

    run = train_one("gpt2: auto", seed=0, settings=SETTINGS, corpus=standard_library())

The runs of a seed have the same weights and batches; all forward passes are exact, so their first losses are equal. The
exact run from weights that differ by a millionth shows the effect of chance.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .data import Corpus
from .hooks import POINTS
from .runs import averaging_window, smoothed
from .settings import Settings, Size
from .small_networks import GPT2, Llama
from .trainer import Loss, next_character
from .training import Variant, train

SETTINGS = Settings(
    steps=600, learning_rate=3e-3, size=Size(width=96, depth=4, heads=4, context=128), validation_windows=256
)
MODELS: Mapping[str, Callable[[Size], nn.Module]] = {"gpt2": GPT2, "llama": Llama}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"bits": None},
    "exact, nudged": {"bits": None},
    "auto": {},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "4 bits, nearest": {"bits": 4, "rounding": "nearest"},
    "3 bits": {"bits": 3},
    "2 bits": {"bits": 2},
}
VARIANTS: tuple[str, ...] = tuple(f"{model}: {name}" for model in MODELS for name in OPTIONS)


def train_one(
    variant: str, seed: int, settings: Settings, corpus: Corpus, after_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Train one variant with one seed; return its results for JSON."""
    model, name = variant.split(": ")
    nudge = 1e-6 if "nudged" in name else 0.0
    made = Variant(variant, nudge=nudge, loss=compiled_loss(OPTIONS[name]))
    (run,) = train([made], corpus, replace(settings, seed=seed), MODELS[model], after_step).runs
    every = max(1, settings.steps // POINTS)
    losses = smoothed(run.losses, averaging_window(settings.steps))
    return {
        "variant": variant,
        "seed": seed,
        "losses": [round(loss, 4) for loss in losses[every - 1 :: every]],
        "validation_loss": run.validation_loss,
        "saved_bytes": run.saved_bytes,
    }


def compiled_loss(options: Mapping[str, Any]) -> Loss:
    """Return the loss of predicting the next characters, compiled in one graph with the model."""
    torch.compiler.reset()

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        return next_character(model, windows)

    return torch.compile(loss, backend="fewbit", options=dict(options), fullgraph=True, dynamic=False)
