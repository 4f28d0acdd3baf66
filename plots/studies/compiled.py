"""Training of GPT-2 and Llama under `torch.compile` with few bits between the passes. Paired seeds, one run at a time.

"lora" is a fine-tuning: one GPT-2, trained exactly on programs, learns English prose by adapters of rank 8 at all its
linear layers; "lora of attention" has them at those of attention alone, so that the MLPs keep factors of gradients and
nothing else.

    python -m fewbit.plots.studies.compiled -o training-compiled.json     all of it; resumes where it was broken off
    run = train_one("gpt2: auto", seed=0, settings=SETTINGS)

The runs of a seed have the same weights and batches; all forward passes are exact, so their first losses are equal. The
exact run from weights that differ by a millionth shows the effect of chance.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from .. import compact_json
from ..demo.data import Corpus, documentation, standard_library
from ..demo.runs import summary
from ..demo.settings import Settings, Size
from ..demo.small_networks import GPT2, Llama
from ..demo.trainer import Loss, next_character
from ..demo.training import Variant, train
from .adapters import adapt

MakeModel = Callable[[Size], nn.Module]

SETTINGS = Settings(
    steps=600, batch=8, learning_rate=3e-3, size=Size(width=96, depth=4, heads=4, context=128), validation_windows=256
)
_ROLES = ("linear", "factor", "probabilities", "attention", "nonlinear")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"bits": None},
    "exact, nudged": {"bits": None},
    "auto": {},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "4 bits, nearest": {"bits": 4, "rounding": "nearest"},
    "3 bits": {"bits": 3},
    "2 bits": {"bits": 2},
    "2 bits, groups": {"bits": 2, "quantizer": "groups"},
    "4 bits, scores 6": {"bits": {**dict.fromkeys(_ROLES, 4), "scores": 6}, "recompute_attention": False},
}
MODELS: Mapping[str, Callable[[Settings], tuple[MakeModel, Corpus]]] = {
    "gpt2": lambda settings: (GPT2, _programs()),
    "llama": lambda settings: (Llama, _programs()),
    "lora": lambda settings: (_adapted(settings, "*"), documentation()),
    "lora of attention": lambda settings: (_adapted(settings, "*.attn.*"), documentation()),
}
VARIANTS: tuple[str, ...] = tuple(f"{model}: {name}" for model in MODELS for name in OPTIONS)


def train_one(
    variant: str,
    seed: int,
    settings: Settings,
    after_step: Callable[[], object] = lambda: None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train one variant with one seed; return its results for JSON."""
    name, bits = variant.split(": ")
    settings = replace(settings, seed=seed)
    nudge = 1e-6 if "nudged" in bits else 0.0
    model, corpus = MODELS[name](settings)
    made = Variant(variant, nudge=nudge, loss=compiled_loss(OPTIONS[bits]))
    (run,) = train([made], corpus, settings, model, after_step, device).runs
    found = summary(run, seed)
    # JSON has no numbers for losses that are not finite, of a run that ran away.
    losses = [loss if math.isfinite(loss) else None for loss in (*found["losses"], found["validation_loss"])]
    return found | {"losses": losses[:-1], "validation_loss": losses[-1]}


@cache
def _programs() -> Corpus:
    return standard_library()


@cache
def _trained(settings: Settings) -> Mapping[str, Tensor]:
    """Return the weights of GPT-2 after exact training on the standard library."""
    models: list[nn.Module] = []
    exact = Variant("exact", prepare=models.append, loss=compiled_loss(OPTIONS["exact"]))
    train([exact], _programs(), settings, GPT2)
    return models[0].state_dict()


def _adapted(settings: Settings, pattern: str) -> MakeModel:
    trained = _trained(replace(settings, seed=0))

    def make(size: Size) -> nn.Module:
        model = GPT2(size)
        model.load_state_dict(trained)
        return adapt(model, pattern=pattern)

    return make


def compiled_loss(options: Mapping[str, Any]) -> Loss:
    """Return the loss of predicting the next characters, compiled in one graph with the model."""
    torch.compiler.reset()

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        return next_character(model, windows)

    return torch.compile(loss, backend="fewbit", options=dict(options), fullgraph=True, dynamic=False)


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the validation losses of each variant minus the exact run's of the same model and seed, or ∞."""
    losses = {(run["variant"], run["seed"]): run["validation_loss"] for run in runs}
    found: dict[str, list[float]] = {}
    for (variant, seed), loss in losses.items():
        exact = f"{variant.split(': ')[0]}: exact"
        if variant != exact and (exact, seed) in losses:
            found.setdefault(variant, []).append(math.inf if loss is None else loss - losses[exact, seed])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the file does not have yet, write it after every run, and print each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; runs that it has are not run again")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    chosen = parser.parse_args(arguments)
    settings = replace(SETTINGS, steps=chosen.steps)
    described = {name: value for name, value in asdict(settings).items() if name != "seed"}
    numbers = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    runs = numbers["runs"] if numbers.get("settings") == described else []
    done = {(run["variant"], run["seed"]) for run in runs}
    for seed in range(chosen.seeds):
        for variant in chosen.variant or VARIANTS:
            if (variant, seed) in done:
                continue
            runs.append(train_one(variant, seed, settings))
            print(variant, seed, runs[-1]["validation_loss"], runs[-1]["saved_bytes"], flush=True)
            compact_json.write(chosen.output, {"settings": described, "runs": runs})
    for variant, values in differences(runs).items():
        print(f"{variant:24} {fmean(values):+.4f}   {' '.join(f'{d:+.4f}' for d in values)}")


if __name__ == "__main__":
    main()
