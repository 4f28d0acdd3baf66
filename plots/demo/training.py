"""Training of one model with several activations, in turn on the same batches.

    training = train([EXACT, few_bit(1), few_bit(3)], standard_library(), Settings(steps=500))
    training = train([EXACT, few_bit(3)], standard_library(), SETTINGS["gpt2"], GPT2)

All variants start from the same weights and see the same batches. A few-bit activation is exact forward, so their first
losses are equal, and later differences come from the derivative alone. They take turns step by step, so that other load
on the machine slows all of them equally.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.convert.api import convert
from ...runtime.convert.find import activations
from ...runtime.plan.memory import profile_call
from ...tables.names import counted
from ...tables.table import check_bits
from . import trainer
from .data import Corpus, random_windows, spread_windows, unigram_entropy
from .runs import Run, Training
from .settings import Settings, Size
from .small_networks import GPT2, Transformer
from .trainer import Curve, Loss, Trainee, held_out_loss, learning_rate_factor, next_character


@dataclass(frozen=True)
class Variant:
    """The settings in which runs differ.

    Attributes:
        name: display name.
        bits: bits for the activations, passed to `fewbit.convert`; None leaves the model unconverted.
        nudge: relative size of a random change of each weight before the first step.
        prepare: a further change to the model before the first step.
        weights_seed: seed of the weights alone, if it differs from the settings'; the batches stay the same.
        context: surrounds each forward pass and its loss.
        loss: of a model on windows of text; compiled, perhaps.
    """

    name: str
    bits: int | None = None
    nudge: float = 0.0
    prepare: Callable[[nn.Module], object] | None = None
    weights_seed: int | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    loss: Loss = next_character


EXACT = Variant("exact")

# Shows how large a meaningless difference grows: weights changed by no more than float32's rounding, then trained.
NUDGED = Variant("exact, nudged", nudge=1e-6)


def few_bit(bits: int) -> Variant:
    """Return the variant with `bits` bits for each element; raises `FewbitError` unless bits is 1 to 8."""
    return Variant(counted(check_bits(bits), "bit"), bits)


def other_weights(seed: int) -> Variant:
    """Return exact training from the weights of another seed, on the same batches: the effect of chance alone."""
    return Variant(f"exact, weights {seed}", weights_seed=seed)


def small(size: Size) -> nn.Module:
    """Return the studies' own transformer, with torch's GELU."""
    return Transformer(size, nn.GELU)


# By the names of `settings.SETTINGS`.
MODELS: dict[str, Callable[[Size], nn.Module]] = {"gpt2": GPT2, "small": small}


def train(
    variants: Sequence[Variant],
    corpus: Corpus,
    settings: Settings,
    model: Callable[[Size], nn.Module] = small,
    after_step: Callable[[], object] = lambda: None,
    device: str = "cpu",
) -> Training:
    """Train every variant and return the runs, in the order of `variants`.

    Args:
        variants: what to compare.
        corpus: each part is longer than a window.
        settings: shared by all.
        model: constructs a model of a given size that scores the next character; one of `MODELS`.
        after_step: called after each step that all variants have taken, for a progress bar.
        device: of the models; weights and batches are drawn on the CPU, and so the same on every one.
    """
    made = [_Made(variant, _model(variant, settings, model).to(device)) for variant in variants]
    draw = torch.Generator().manual_seed(settings.seed)

    def batch() -> Tensor:
        return random_windows(corpus.training, settings.batch, settings.size.context, draw).to(device)

    trainer.train([one.trainee(settings) for one in made], (batch() for _ in range(settings.steps)), after_step)
    example = batch()
    held_out = spread_windows(corpus.validation, settings.validation_windows, settings.size.context).to(device)
    runs = tuple(one.run(example, held_out.split(settings.batch)) for one in made)
    return Training(settings, unigram_entropy(corpus.validation), runs)


def adamw(model: nn.Module, settings: Settings, loss: Loss = next_character, curve: Curve | None = None) -> Trainee:
    """Return a trainee for a character model, as `settings` specify; its losses go into `curve`."""
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, fused=True)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
    return Trainee(model, loss, optimizer, schedule, settings.largest_gradient, record=curve or Curve())


def _model(variant: Variant, settings: Settings, make: Callable[[Size], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # leaves the caller's generator unchanged
        torch.manual_seed(settings.seed if variant.weights_seed is None else variant.weights_seed)
        model = make(settings.size)
        if variant.nudge:
            _nudge(model, variant.nudge)
    if variant.bits:
        convert(model, variant.bits)
    if variant.prepare:
        variant.prepare(model)
    return model


@dataclass(frozen=True)
class _Made:
    """The model of a variant, and the records of its training."""

    variant: Variant
    model: nn.Module
    curve: Curve = field(default_factory=Curve)

    def loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        with self.variant.context():
            return self.variant.loss(model, windows)

    def trainee(self, settings: Settings) -> Trainee:
        return adamw(self.model, settings, self.loss, self.curve)

    def run(self, example: Tensor, held_out: Sequence[Tensor]) -> Run:
        """Return the run, with the bytes saved in one more forward pass, of `example`, and the validation loss."""
        with self.variant.context():
            saved = profile_call(self.model, lambda: self.variant.loss(self.model, example))
        by_module = saved.by_module()
        return Run(
            variant=self.variant.name,
            losses=tuple(self.curve.losses),
            seconds=tuple(self.curve.seconds),
            validation_loss=held_out_loss(self.model, held_out),
            activation_bytes=sum(by_module.get(found.name, 0) for found in activations(self.model)),
            saved_bytes=saved.total,
        )


@torch.no_grad()
def _nudge(model: nn.Module, part: float) -> None:
    for weight in model.parameters():
        weight.mul_(1 + part * torch.randn_like(weight).sign())
