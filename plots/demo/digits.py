"""Training of a small residual network on scikit-learn's handwritten digits.

    data = digits()
    result = train(network(seed=0), data, Schedule(epochs=12))

Real data available on any machine, small enough to train dozens of networks in minutes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from . import trainer
from .data import Images
from .small_networks import resnet
from .trainer import Curve, Trainee, cross_entropy


@dataclass(frozen=True)
class Schedule:
    """Training settings: SGD with momentum; as in the paper, each third of the epochs divides the learning rate by 10.

    Attributes:
        epochs: passes over the training images.
        batch: images in a step.
        learning_rate: the initial one.
        seed: seed of the order of images.
    """

    epochs: int = 12
    batch: int = 64
    learning_rate: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """Results of a training.

    Attributes:
        accuracy: on the test images, after the last epoch.
        losses: mean training loss of each epoch.
    """

    accuracy: float
    losses: tuple[float, ...]


def network(seed: int = 0, width: int = 12) -> nn.Sequential:
    """Return a residual network for the digits, in training mode; equal for equal seeds."""
    torch.manual_seed(seed)
    blocks = ((width, 1), (2 * width, 2), (2 * width, 2))
    return resnet(partial(nn.ReLU, inplace=True), blocks, normed=False, shortcut_first=False)


def train(
    model: nn.Module,
    data: Images,
    schedule: Schedule,
    *,
    after_epoch: Callable[[], object] = lambda: None,
    falls: bool = True,
) -> Trained:
    """Train `model` in place.

    Args:
        model: images -> 10 logits.
        data: training and test images.
        schedule: training settings.
        after_epoch: called after each epoch.
        falls: whether the learning rate does; otherwise it stays the initial one.
    """
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9, weight_decay=1e-4)
    third = math.ceil(schedule.epochs / 3)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, third, 0.1 if falls else 1.0)
    losses = []
    for epoch in range(schedule.epochs):
        model.train()
        curve = Curve()
        given = list(batches(data, schedule, epoch))
        trainer.train([Trainee(model, cross_entropy, optimizer, record=curve)], given)
        total = sum(loss * len(classes) for loss, (_, classes) in zip(curve.losses, given, strict=True))
        losses.append(total / len(data.training))
        rates.step()
        after_epoch()
    return Trained(accuracy(model, data), tuple(losses))


def batches(data: Images, schedule: Schedule, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training images and classes of an epoch, in an order determined by seed and epoch alone."""
    generator = torch.Generator().manual_seed(1000 * schedule.seed + epoch)
    order = torch.randperm(len(data.training), generator=generator)
    for part in order.split(schedule.batch):
        yield data.training[part], data.training_classes[part]


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of test images that `model` classifies correctly, in evaluation mode."""
    model.eval()
    return float((model(data.test).argmax(1) == data.test_classes).float().mean())
