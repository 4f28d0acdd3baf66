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
        if self.name == "Activation":
            return self.arguments[0]
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
    Case("BatchNorm1d", (5,), (40, 5), {"momentum": None}, linear=False),
    Case("BatchNorm1d", (5,), (8, 5, 6), {"affine": False}, linear=False),
    Case("BatchNorm2d", (3,), (2, 3, 8, 8), linear=False),
    Case("BatchNorm2d", (3,), (2, 3, 8, 8), {"track_running_stats": False}, linear=False),
    Case("BatchNorm3d", (3,), (2, 3, 3, 4, 5), linear=False),
    Case("SyncBatchNorm", (3,), (2, 3, 8, 8), linear=False),
    Case("InstanceNorm1d", (3,), (2, 3, 40), linear=False),
    Case("InstanceNorm2d", (3,), (2, 3, 8, 8), {"affine": True, "track_running_stats": True}, linear=False),
    Case("InstanceNorm3d", (3,), (2, 3, 3, 4, 5), {"affine": True}, linear=False),
]
LAYER_NORMS = [
    Case("LayerNorm", (6,), (5, 6), linear=False),
    Case("LayerNorm", ((4, 6),), (3, 2, 4, 6), {"bias": False}, linear=False),
    Case("LayerNorm", (6,), (5, 3, 6), {"elementwise_affine": False}, linear=False),
    Case("GroupNorm", (2, 4), (3, 4, 5, 6), linear=False),
    Case("GroupNorm", (1, 4), (3, 4, 5), {"affine": False}, linear=False),
    Case("RMSNorm", (6,), (5, 3, 6), {"eps": 1e-3}, linear=False),
    Case("RMSNorm", ((4, 6),), (3, 4, 6), linear=False),
]
SOFTMAXES = [
    Case("Softmax", (-1,), (3, 4, 6), linear=False),
    Case("Softmax", (), (5, 6), linear=False),
    Case("LogSoftmax", (1,), (4, 6, 3)),
]
NORMS = [*BATCH_NORMS, *LAYER_NORMS, *SOFTMAXES[:2]]
ACTIVATIONS = [Case("Activation", (nn.GELU(),), (3, 4, 6)), Case("Activation", (nn.Softplus(),), (30,))]
CASES = [*LINEARS, *CONVOLUTIONS, *NORMS, SOFTMAXES[2], *ACTIVATIONS]  # all that compress

# What has no saver: the gradient is exact.
EXACT = [
    Case("Dropout", (0.3,), (4, 30)),
    Case("Dropout", (0.0,), (4, 30)),
    Case("Dropout", (1.0,), (4, 30)),
    Case("MaxPool1d", (3,), (2, 3, 11), {"padding": 1}),
    Case("MaxPool2d", (2,), (2, 3, 8, 9)),
    Case("MaxPool2d", (3,), (3, 9, 8), {"stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True}),
    Case("MaxPool2d", ((2, 3),), (2, 3, 9, 8), {"stride": (1, 2)}),
    Case("MaxPool2d", (17,), (1, 2, 20, 20), {"stride": 1}),
    Case("MaxPool3d", (2,), (2, 2, 4, 5, 6), {"stride": 1}),
    Case("AvgPool1d", (3,), (2, 3, 11), {"padding": 1}),
    Case("AvgPool2d", (3,), (2, 3, 8, 9), {"stride": 2, "count_include_pad": False}),
    Case("AvgPool3d", (2,), (2, 2, 4, 5, 6), {"divisor_override": 3}),
    Case("AdaptiveAvgPool1d", (4,), (2, 3, 11)),
    Case("AdaptiveAvgPool2d", ((3, None),), (2, 3, 8, 7)),
    Case("AdaptiveAvgPool2d", (1,), (2, 3, 8, 7)),
    Case("AdaptiveAvgPool3d", (2,), (2, 3, 4, 5, 6)),
    Case("Upsample", (), (2, 3, 4, 5), {"scale_factor": 2}),
    Case("Upsample", (), (2, 3, 4, 5), {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True}),
    Case("Upsample", (), (2, 3, 8, 6), {"size": (3, 4), "mode": "area"}),
]


class Draws:
    """Mean and standard error of tensors that are drawn again and again."""

    def __init__(self):
        self.count, self.sum, self.squares = 0, 0.0, 0.0

    def add(self, x):
        x = x.double()
        self.count, self.sum, self.squares = self.count + 1, self.sum + x, self.squares + x * x

    def standard_errors_from(self, true):
        """How many standard errors the mean lies from `true`, at most.

        Added to the standard error are 1e-5 for float32's rounding and, as what happens once in N/5 draws may not
        happen in N and leave no deviation, 1/N of the steps that numbers take: twice the largest deviation.
        """
        variance = self.variance()
        error = (variance / self.count).sqrt() + 2 * variance.max().sqrt() / self.count + 1e-5
        return ((self.sum / self.count - true.double()).abs() / error).max().item()

    def variance(self):
        mean = self.sum / self.count
        return (self.squares / self.count - mean**2).clamp(min=0) * self.count / (self.count - 1)
