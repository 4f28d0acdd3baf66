"""A small residual network for the digits that come with scikit-learn: 1,797 grey images of 8 by 8, ten classes.

    stem                    convolution 3×3, norm, activation
    block                   x + norm(conv(activation(norm(conv(x))))), activation; the first of a stage halves the image
    head                    average over the image, Linear

As He et al. (2016) have it for CIFAR, with fewer blocks; ReLU may be any activation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10
VALIDATION_EVERY = 5  # images


@dataclass(frozen=True)
class Digits:
    """Images, float32 (n, 1, 8, 8) from 0 to 1, and their classes, int64 (n,), in two parts."""

    images: Tensor
    classes: Tensor
    validation_images: Tensor
    validation_classes: Tensor


def digits() -> Digits:
    """Return scikit-learn's digits, every fifth for validation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16  # pyright: ignore[reportAttributeAccessIssue]
    classes = torch.tensor(found.target, dtype=torch.long)  # pyright: ignore[reportAttributeAccessIssue]
    held_out = torch.arange(len(classes)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return Digits(images[~held_out], classes[~held_out], images[held_out], classes[held_out])


class ResNet(nn.Sequential):
    """Scores of the ten classes, (n, 10), for images (n, 1, height, width).

    Args:
        activation: makes one, such as ``torch.nn.ReLU``.
        widths: channels of each stage.
        depth: blocks in a stage.
    """

    def __init__(self, activation: Callable[[], nn.Module], widths: tuple[int, ...] = (16, 32), depth: int = 2) -> None:
        stem = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), activation()]
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(depth):
                blocks.append(Block(before, width, 2 if stage and not block else 1, activation))
                before = width
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            activation(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after this block."""
        return self.activation(self.shortcut(x) + self.inner(x))
