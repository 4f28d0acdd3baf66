"""The training loop of all studies: several models in turn on the same batches.

    curve = Curve()
    train([Trainee(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), record=curve)], batches)

Models take turns batch by batch, so that other load on the machine slows all of them equally.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Trainee:
    """A model in training.

    Attributes:
        model: the model to train.
        loss: of the model on a batch.
        optimizer: of its parameters.
        schedule: learning rate schedule, advanced after each update; None keeps the rate constant.
        largest_gradient: maximum norm of the gradient of all parameters together, for clipping; None disables clipping.
        before_step: called with the step number before each step, for example to seed a generator.
        record: called after each step with its loss, before the update, and its duration in seconds.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    largest_gradient: float | None = None
    before_step: Callable[[int], object] = lambda step: None
    record: Callable[[float, float], object] = lambda loss, seconds: None


@dataclass(frozen=True)
class Curve:
    """Loss and time of each step; a trainee's `record`."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __call__(self, loss: float, seconds: float) -> None:
        """Record one more step."""
        self.losses.append(loss)
        self.seconds.append(seconds)


def train(trainees: Sequence[Trainee], batches: Iterable[Any], after_step: Callable[[], object] = lambda: None) -> None:
    """Train models in place, each on every batch; `after_step` is called when all have taken the step."""
    for step, batch in enumerate(batches):
        turn = step % len(trainees)  # rotates who goes first
        for trainee in (*trainees[turn:], *trainees[:turn]):
            _step(trainee, step, batch)
        after_step()


def _step(trainee: Trainee, step: int, batch: Any) -> None:
    trainee.before_step(step)
    start = time.perf_counter()
    loss = trainee.loss(trainee.model, batch)
    loss.backward()
    if trainee.largest_gradient is not None:
        nn.utils.clip_grad_norm_(trainee.model.parameters(), trainee.largest_gradient)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    value = loss.item()
    trainee.record(value, time.perf_counter() - start)
    if trainee.schedule:
        trainee.schedule.step()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss, in nats, of predicting the classes of a batch (inputs, classes)."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def next_character(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats, of predicting each character of `windows` from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def held_out_loss(model: nn.Module, parts: Sequence[Tensor]) -> float:
    """Return the mean `next_character` over all windows of `parts`."""
    with torch.no_grad():
        total = sum(next_character(model, part).item() * len(part) for part in parts)
    return total / sum(map(len, parts))


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the learning rate at `step` (0 to steps − 1) relative to the largest: a warm-up, then a cosine."""
    warm_up = max(1, steps // 20)
    return min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2
