"""Handwritten digits (scikit-learn ships 1,797 of them, 8×8) and a small deep network that reads them.

    data = digits()
    result = train(network(seed=0), data, Schedule(epochs=12), prepare=lambda model: ...)

Real data that any machine has, small enough to train dozens of networks in minutes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import FewbitError


@dataclass(frozen=True)
class Images:
    """Images and their classes, in two parts.

    Attributes:
        training, validation: float32 (n, 1, 8, 8), of mean 0 and deviation 1 over all pixels that are trained on.
        training_classes, validation_classes: int64 (n,), 0 to 9.
    """

    training: Tensor
    training_classes: Tensor
    validation: Tensor
    validation_classes: Tensor


@dataclass(frozen=True)
class Schedule:
    """How to train: SGD with momentum, the learning rate a tenth after each third of the epochs, as the paper does.

    Attributes:
        epochs: passes over the training images.
        batch: images in a step.
        learning_rate: the first.
        seed: of the order of images.
    """

    epochs: int = 12
    batch: int = 64
    learning_rate: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        accuracy: on the validation images, after the last epoch.
        losses: mean training loss of each epoch.
    """

    accuracy: float
    losses: tuple[float, ...]


def digits() -> Images:
    """Return the digits, every fifth for validation.

    Raises:
        FewbitError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise FewbitError("the digits come with scikit-learn: pip install scikit-learn") from error
    data: Any = load_digits()
    images = torch.tensor(data["images"], dtype=torch.float32).unsqueeze(1)
    classes = torch.tensor(data["target"], dtype=torch.int64)
    held_out = torch.arange(len(classes)) % 5 == 4
    mean, deviation = images[~held_out].mean(), images[~held_out].std()
    images = (images - mean) / deviation
    return Images(images[~held_out], classes[~held_out], images[held_out], classes[held_out])


class Block(nn.Module):
    """Two convolutions with batch normalisation and ReLU, and a way around them (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu2 = nn.ReLU(inplace=True)
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features that follow."""
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.around(x))


def network(seed: int = 0, width: int = 12, blocks: int = 3) -> nn.Sequential:
    """Return a residual network for the digits, in training mode; the same for the same seed."""
    torch.manual_seed(seed)
    body: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    before = width
    for i in range(blocks):
        after = width * min(2, i + 1)
        body.append(Block(before, after, 2 if i in (1, 2) else 1))
        before = after
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def train(
    model: nn.Module,
    data: Images,
    schedule: Schedule,
    *,
    after_epoch: Callable[[int], object] = lambda epoch: None,
) -> Trained:
    """Train `model` in place.

    Args:
        model: images -> 10 logits.
        data: to train on and to validate with.
        schedule: how.
        after_epoch: is called with the number of epochs done.
    """
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9, weight_decay=1e-4)
    third = math.ceil(schedule.epochs / 3)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, third, 0.1)
    losses = []
    for epoch in range(schedule.epochs):
        model.train()
        total = 0.0
        for images, classes in batches(data, schedule, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(classes)
        losses.append(total / len(data.training))
        rates.step()
        after_epoch(epoch + 1)
    return Trained(accuracy(model, data), tuple(losses))


def batches(data: Images, schedule: Schedule, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training images and classes of an epoch, in an order that seed and epoch alone decide."""
    generator = torch.Generator().manual_seed(1000 * schedule.seed + epoch)
    order = torch.randperm(len(data.training), generator=generator)
    for part in order.split(schedule.batch):
        yield data.training[part], data.training_classes[part]


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of validation images that `model` reads right, in evaluation mode."""
    model.eval()
    return float((model(data.validation).argmax(1) == data.validation_classes).float().mean())
