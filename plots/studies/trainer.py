"""The training loop of all studies: models side by side, on the same batches.

    curve = Curve()
    train([Trainee(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), record=curve)], batches)

Models take turns batch by batch, so that whatever else the machine does meanwhile slows all of them alike.
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
        model: what is trained.
        loss: of the model on a batch.
        optimizer: of its parameters.
        schedule: of the learning rate, moved on after each update; None leaves it as it is.
        largest_gradient: norm to which a longer gradient, of all parameters together, is cut; None cuts none.
        before_step: called with the number of each step before it, for what the step draws at random.
        record: called after each step with its loss, before the update, and the seconds that it took.
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
    """Loss and time of each step, as a trainee's `record` is told them."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __call__(self, loss: float, seconds: float) -> None:
        """Note one more step."""
        self.losses.append(loss)
        self.seconds.append(seconds)


def train(trainees: Sequence[Trainee], batches: Iterable[Any], after_step: Callable[[], object] = lambda: None) -> None:
    """Train models in place, a step of each on every batch; `after_step` is called when all have taken it."""
    for step, batch in enumerate(batches):
        turn = step % len(trainees)  # who goes first changes, too
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
    """Return the mean loss, in nats, of telling the classes of a batch (inputs, classes)."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def next_character(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats, of telling each character of `windows` from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the part of the largest learning rate that `step` (0 to steps − 1) takes: a warm-up, then a cosine."""
    warm_up = max(1, steps // 20)
    return min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2
