"""Train the same model with several activations, side by side.

    training = train([EXACT, few_bit(1), few_bit(3)], standard_library(), Settings(steps=500))
    training = train([EXACT, few_bit(3)], standard_library(), SETTINGS["gpt2"], GPT2)

All variants start from the same weights and see the same batches; since a few-bit activation is exact forward, their
first losses are equal, and later differences come from the derivative alone. They take turns step by step, so that
whatever else the machine does meanwhile slows all of them alike.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.convert.api import convert
from ...runtime.convert.find import activations
from ...runtime.plan.memory import profile_call
from ...tables.names import counted
from ...tables.table import check_bits
from .gpt2 import GPT2
from .runs import Run, Training
from .settings import Settings, Size
from .text import Corpus, unigram_entropy
from .transformer import Transformer


@dataclass(frozen=True)
class Variant:
    """What the runs differ in.

    Attributes:
        name: for people.
        bits: to which `fewbit.convert` takes the model's activations; None leaves them as they are.
        nudge: by what part each weight is made larger or smaller, at random, before the first step.
        prepare: what else is done to the model before the first step.
        weights_seed: of the weights alone, where not that of the settings; the batches stay the same.
        context: surrounds each forward pass and its loss.
    """

    name: str
    bits: int | None = None
    nudge: float = 0.0
    prepare: Callable[[nn.Module], object] | None = None
    weights_seed: int | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


EXACT = Variant("exact")

# What a difference is that means nothing: as large as float32's rounding at the start, and trained on from there.
NUDGED = Variant("exact, nudged", nudge=1e-6)


def few_bit(bits: int) -> Variant:
    """Return the variant with `bits` bits for each element; raises `FewbitError` unless bits is 1 to 8."""
    return Variant(counted(check_bits(bits), "bit"), bits)


def other_weights(seed: int) -> Variant:
    """Return exact training from the weights of another seed, on the same batches: how far chance alone leads."""
    return Variant(f"exact, weights {seed}", weights_seed=seed)


def small(size: Size) -> nn.Module:
    """Return the experiments' own transformer, with torch's GELU."""
    return Transformer(size, nn.GELU)


# By the names of `settings.SETTINGS`.
MODELS: dict[str, Callable[[Size], nn.Module]] = {"gpt2": GPT2, "small": small}


def train(
    variants: Sequence[Variant],
    corpus: Corpus,
    settings: Settings,
    model: Callable[[Size], nn.Module] = small,
    after_step: Callable[[], object] = lambda: None,
) -> Training:
    """Train every variant on the CPU and return the runs, in the order of `variants`.

    Args:
        variants: what to compare.
        corpus: each part longer than a window.
        settings: shared by all.
        model: makes a model of a size, which scores the next character; one of `MODELS`.
        after_step: called after every step that all variants have taken, for a progress bar.
    """
    trainees = [_Trainee(variant, settings, model) for variant in variants]
    draw = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps):
        batch = random_windows(corpus.training, settings.batch, settings.size.context, draw)
        turn = step % len(trainees)  # who goes first changes, too
        for trainee in trainees[turn:] + trainees[:turn]:
            trainee.step(batch)
        after_step()
    example = random_windows(corpus.training, settings.batch, settings.size.context, draw)
    held_out = spread_windows(corpus.validation, settings.validation_windows, settings.size.context)
    runs = tuple(trainee.finish(example, held_out) for trainee in trainees)
    return Training(settings, unigram_entropy(corpus.validation), runs)


def random_windows(text: Tensor, count: int, context: int, draw: torch.Generator) -> Tensor:
    """Return `count` windows of context + 1 characters from anywhere in `text`, int64 (count, context + 1)."""
    starts = torch.randint(len(text) - context, (count,), generator=draw)
    return _windows(text, starts, context)


def spread_windows(text: Tensor, count: int, context: int) -> Tensor:
    """Return `count` windows of context + 1 characters, evenly spread over `text`, int64 (count, context + 1)."""
    starts = torch.arange(count) * (len(text) - context - 1) // max(1, count - 1)
    return _windows(text, starts, context)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats, of telling each character of `windows` from those before it."""
    scores = model(windows[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the part of the largest learning rate that `step` (0 to steps − 1) takes."""
    warm_up = max(1, steps // 20)
    return min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2


class _Trainee:
    """A model in training, and what has been measured of it so far."""

    def __init__(self, variant: Variant, settings: Settings, model: Callable[[Size], nn.Module]) -> None:
        self.variant = variant
        self.batch = settings.batch
        self.largest_gradient = settings.largest_gradient
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.manual_seed(settings.seed if variant.weights_seed is None else variant.weights_seed)
            self.model = model(settings.size)
            if variant.nudge:
                _nudge(self.model, variant.nudge)
        if variant.bits:
            convert(self.model, variant.bits)
        if variant.prepare:
            variant.prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.learning_rate, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, settings.steps)
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Tensor) -> None:
        start = time.perf_counter()
        with self.variant.context():
            loss = loss_of(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()

    def finish(self, example: Tensor, held_out: Tensor) -> Run:
        """Return the run: what one more forward pass, of the batch `example`, would keep, and the validation loss."""
        with self.variant.context():
            saved = profile_call(self.model, lambda: loss_of(self.model, example))
        by_module = saved.by_module()
        return Run(
            variant=self.variant.name,
            losses=tuple(self.losses),
            seconds=tuple(self.seconds),
            validation_loss=self._validate(held_out),
            activation_bytes=sum(by_module.get(found.name, 0) for found in activations(self.model)),
            saved_bytes=saved.total,
        )

    @torch.no_grad()
    def _validate(self, held_out: Tensor) -> float:
        total = sum(loss_of(self.model, part).item() * len(part) for part in held_out.split(self.batch))
        return total / len(held_out)


@torch.no_grad()
def _nudge(model: nn.Module, part: float) -> None:
    for weight in model.parameters():
        weight.mul_(1 + part * torch.randn_like(weight).sign())


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()
