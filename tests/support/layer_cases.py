"""Every compressed layer beside torch's: how both are made, and an input for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fewbit import layers
from torch import nn


@dataclass(frozen=True)
class Case:
    """A layer, in both forms.

    Attributes:
        name: class in `fewbit.layers` and torch.nn.
        arguments: of the class.
        shape: of an input whose first dimension is that of samples.
        keywords: of the class.
        call: of the layer.
        make: an input of a shape, float32.
        linear: whether the gradients are linear in what is saved, and so unbiased.
    """

    name: str
    arguments: tuple
    shape: tuple[int, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., torch.Tensor] = torch.randn
    linear: bool = True

    def compressed(self, **options):
        """The layer of `fewbit.layers`, with weights that are not torch's first ones."""
        torch.manual_seed(1)
        return stirred(getattr(layers, self.name)(*self.arguments, **self.keywords, **options))

    def torchs(self):
        """The layer of torch.nn, with the same weights."""
        torch.manual_seed(1)
        return stirred(getattr(nn, self.name)(*self.arguments, **self.keywords))

    def input(self, seed=0):
        torch.manual_seed(seed)
        return self.make(*self.shape)

    def __str__(self):
        text = ", ".join([*map(str, self.arguments), *(f"{k}={v}" for k, v in self.keywords.items())])
        return f"{self.name}({text})-{'x'.join(map(str, self.shape))}"


def stirred(layer):
    """Change weights that begin as ones and zeros, for these would hide mistakes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


CONVOLUTIONS = [
    Case("Conv1d", (3, 4, 3), (2, 3, 9)),
    Case("Conv1d", (3, 4, 3), (3, 9), {"stride": 2}),
    Case("Conv2d", (4, 6, 3), (2, 4, 8, 7), {"padding": 1, "stride": 2, "groups": 2}),
    Case("Conv2d", (4, 4, (3, 4)), (2, 4, 8, 7), {"padding": "same", "bias": False}),
    Case("Conv2d", (4, 4, 3), (2, 4, 8, 7), {"padding": "valid", "dilation": 2}),
    Case("Conv2d", (4, 4, 3), (2, 4, 8, 7), {"padding": (1, 2), "padding_mode": "circular"}),
    Case("Conv3d", (2, 3, 3), (2, 2, 4, 5, 6), {"padding": 1}),
    Case("ConvTranspose1d", (3, 4, 3), (2, 3, 9), {"stride": 2, "output_padding": 1}),
    Case("ConvTranspose2d", (4, 6, 3), (2, 4, 5, 6), {"stride": 2, "groups": 2}, {"output_size": (12, 14)}),
    Case("ConvTranspose2d", (4, 6, 3), (4, 5, 6), {"padding": 1}),
    Case("ConvTranspose3d", (2, 3, 3), (2, 2, 3, 4, 5), {"stride": 2, "bias": False}),
]
LINEARS = [
    Case("Linear", (6, 4), (3, 6)),
    Case("Linear", (6, 4), (3, 5, 6), {"bias": False}),
    Case("Linear", (6, 4), (6,)),
]
BATCH_NORMS = [
    Case("BatchNorm1d", (5,), (16, 5), {"momentum": None}, linear=False),
    Case("BatchNorm1d", (5,), (4, 5, 6), {"affine": False}, linear=False),
    Case("BatchNorm2d", (3,), (2, 3, 8, 8), linear=False),
    Case("BatchNorm2d", (3,), (2, 3, 8, 8), {"track_running_stats": False}, linear=False),
    Case("BatchNorm3d", (3,), (2, 3, 3, 4, 5), linear=False),
    Case("SyncBatchNorm", (3,), (2, 3, 8, 8), linear=False),
    Case("InstanceNorm1d", (3,), (2, 3, 9), linear=False),
    Case("InstanceNorm2d", (3,), (2, 3, 8, 8), {"affine": True, "track_running_stats": True}, linear=False),
    Case("InstanceNorm3d", (3,), (2, 3, 3, 4, 5), {"affine": True}, linear=False),
]
NORMS = [*BATCH_NORMS]
CASES = [*LINEARS, *CONVOLUTIONS, *NORMS]


class Draws:
    """Mean and standard error of tensors that are drawn again and again."""

    def __init__(self):
        self.count, self.sum, self.squares = 0, 0.0, 0.0

    def add(self, x):
        x = x.double()
        self.count, self.sum, self.squares = self.count + 1, self.sum + x, self.squares + x * x

    def standard_errors_from(self, true, floor):
        """How many standard errors the mean lies from `true`, at most; `floor` is added to the error as rounding."""
        mean = self.sum / self.count
        variance = (self.squares / self.count - mean**2).clamp(min=0) * self.count / (self.count - 1)
        return ((mean - true.double()).abs() / ((variance / self.count).sqrt() + floor)).max().item()

    def spread(self):
        """The largest standard deviation of a number."""
        return (self.squares / self.count - (self.sum / self.count) ** 2).max().item() ** 0.5
