"""Training of GPT-2 with saved-tensor hooks, with ActNN's levels, and with both. Paired seeds, one run at a time.

    run = train_one("L2 and hooks", seed=0, settings=SETTINGS, corpus=standard_library())

The runs of a seed have the same weights and batches; all forward passes are exact, so their first losses are equal. The
exact run from weights that differ by a millionth shows the effect of chance.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn

from ...runtime.convert.api import convert
from ...runtime.quantizers import PerGroup
from ...runtime.saved.hooks import compress_saved_tensors
from ..demo.data import Corpus
from ..demo.runs import summary
from ..demo.settings import Settings, Size
from ..demo.small_networks import GPT2
from ..demo.training import EXACT, NUDGED, Variant, train

SETTINGS = Settings(
    steps=250, learning_rate=3e-3, size=Size(width=96, depth=4, heads=4, context=128), validation_windows=256
)


def hooks(bits: int) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a context of saved-tensor hooks at `bits` bits."""
    return lambda: compress_saved_tensors(PerGroup(bits=bits))


def level(name: str, bits: float | None = None) -> Callable[[nn.Module], object]:
    """Return a function that converts a model to ActNN's level `name`."""
    return lambda model: convert(model, bits, level=name)


def eager_attention(model: nn.Module) -> None:
    """Switch to eager attention, which keeps its probabilities."""
    model.model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        EXACT,
        Variant("hooks, 4 bits", context=hooks(4)),
        Variant("L2 and hooks", prepare=level("L2"), context=hooks(4)),
        Variant("L2", prepare=level("L2")),
        NUDGED,
        Variant("L3, 2 bits", prepare=level("L3", 2)),
        Variant("hooks, 4 bits, eager attention", prepare=eager_attention, context=hooks(4)),
    )
}


def train_one(
    variant: str, seed: int, settings: Settings, corpus: Corpus, after_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Train one variant with one seed; return its results for JSON."""
    (run,) = train([VARIANTS[variant]], corpus, replace(settings, seed=seed), GPT2, after_step).runs
    return summary(run, seed)
