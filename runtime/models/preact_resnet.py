"""Pre-activation residual networks of up to a thousand layers and more (He et al. 2016b; BLPA, Section 4).

    model = preact_resnet(164, classes=100)              4 bits for each activation, exact forward
    model = preact_resnet(164, bits=None)                exact; saves one activation a layer
    model = preact_resnet(164, fused=False)              exact; torch's own modules, which save two
    model = preact_resnet(164, width=4)                  a quarter of the features
    model = preact_resnet(164, bits=8, naive=True)       the forward pass is approximate too: it fails

All of them have the same parameters under the same names. Units are bottlenecks of three layers, 1×1, 3×3 and 1×1.
Shortcuts have no parameters: where the shape changes they drop every other pixel, and add nothing to the new channels.
The sum is computed in place in the unit's output, so that no unit saves its input.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import FewbitError
from ..layers.preact import PreActConv2d, PreActLayer, PreActLinear

EXPANSION = 4  # output channels of a unit, in widths
# Units of each stage for images of ImageNet's size, by depth.
IMAGENET = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


class Unfused(nn.Module):
    """A pre-activation layer in torch's own operations, which save the input and the output of the normalization."""

    norm: nn.Module
    linear: nn.Module
    before: nn.ModuleList

    def __init__(self, layer: PreActLayer) -> None:
        super().__init__()
        self.norm, self.linear, self.before = layer.norm, layer.linear, layer.before

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        x = F.relu(self.norm(x), inplace=True)
        for module in self.before:
            x = module(x)
        return self.linear(x)


class Bottleneck(nn.Module):
    """x + conv1×1(conv3×3(conv1×1(x))), each convolution a pre-activation layer."""

    layers: nn.Sequential

    def __init__(self, channels: int, width: int, stride: int, bits: int | None, naive: bool, fused: bool) -> None:
        super().__init__()
        how = {"bias": False, "bits": bits, "naive": naive}
        layers = (
            PreActConv2d(channels, width, 1, **how),
            PreActConv2d(width, width, 3, stride=stride, padding=1, **how),
            PreActConv2d(width, EXPANSION * width, 1, **how),
        )
        self.layers = nn.Sequential(*(layers if fused else map(Unfused, layers)))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 4·width, H/stride, W/stride) for (N, channels, H, W)."""
        out = self.layers(x)
        shortcut = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        if out.shape[1] == x.shape[1]:
            return out.add_(shortcut)
        out[:, : x.shape[1]].add_(shortcut)
        return out


class PreActResNet(nn.Module):
    """A pre-activation residual network; see `preact_resnet`.

    Attributes:
        stem: first layers.
        units: all bottlenecks.
        head: normalization, ReLU, global average pooling and the classifier.
    """

    units: nn.Sequential
    head: nn.Module

    def __init__(
        self,
        stages: Sequence[int],
        classes: int,
        width: int,
        in_channels: int,
        stem: nn.Module,
        *,
        bits: int | None,
        naive: bool,
        fused: bool,
    ) -> None:
        super().__init__()
        self.stem = stem
        channels, units = in_channels, []
        for stage, count in enumerate(stages):
            for unit in range(count):
                stride = 2 if stage and not unit else 1
                units.append(Bottleneck(channels, width << stage, stride, bits, naive, fused))
                channels = EXPANSION * (width << stage)
        self.units = nn.Sequential(*units)
        head = PreActLinear(channels, classes, pool=nn.AdaptiveAvgPool2d(1), bits=bits, naive=naive)
        self.head = head if fused else Unfused(head)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (N, classes) for images (N, channels, H, W)."""
        return self.head(self.units(self.stem(x)))


def preact_resnet(
    depth: int,
    classes: int = 10,
    *,
    width: int | None = None,
    stem: str = "cifar",
    in_channels: int = 3,
    bits: int | None = 4,
    naive: bool = False,
    fused: bool = True,
) -> PreActResNet:
    """Return a pre-activation residual network of `depth` layers with weights.

    Args:
        depth: 9n + 2 with the stem "cifar" (164, 254, 488 and 1001 in the paper); 50, 101, 152 or 200 with "imagenet".
        classes: of the output.
        width: channels inside the units of the first stage, doubled by each later stage; None is 16 or 64, by stem.
        stem: "cifar": one 3×3 convolution and three stages; "imagenet": 7×7, pooled, and four.
        in_channels: of the images.
        bits: saved for each activation, 1 to 8; None saves one exact activation a layer.
        naive: compute the forward pass with the dequantized activations, as the paper's baseline does.
        fused: False uses torch's own modules instead of the fused layers; `bits` and `naive` are then ignored.

    Raises:
        FewbitError: `depth`, `stem` or `bits` is not one of the values above.

    Example:
        y = fewbit.models.preact_resnet(29, width=8, bits=4)(images)
    """
    if stem not in ("cifar", "imagenet"):
        raise FewbitError(f"stem is cifar or imagenet, not {stem!r}")
    width = width or (16 if stem == "cifar" else 64)
    if stem == "cifar":
        if not isinstance(depth, int) or depth < 11 or depth % 9 != 2:
            raise FewbitError(f"depth is 9n + 2 with the stem cifar, such as 164 or 1001, not {depth!r}")
        stages: Sequence[int] = (depth // 9,) * 3
        first: nn.Module = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
    else:
        if depth not in IMAGENET:
            raise FewbitError(f"depth is {', '.join(map(str, IMAGENET))} with the stem imagenet, not {depth!r}")
        stages = IMAGENET[depth]
        first = nn.Sequential(
            nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
    return PreActResNet(stages, classes, width, width, first, bits=bits, naive=naive, fused=fused)
