"""The image networks of V-Quant's Table 4, as torch modules whose activations are measured on the meta device.

Written from the papers that define them, with the sizes of torchvision, whose models the paper trains. Inception-v3 is
missing. MobileNet-v2 uses ReLU in place of ReLU6, as in the paper. Dropout keeps no activation counted here and is left
out. The VGGs and DenseNets of the Few-bit paper's Appendix B that `transformers` lacks are here too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def conv(
    before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, norm: bool = True
) -> list[nn.Module]:
    """Return a convolution that keeps the size except for its stride, optional batch normalization, and ReLU."""
    layers: list[nn.Module] = [nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=not norm)]
    return [*layers, *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU(inplace=True)]


def alexnet() -> nn.Module:
    """Return AlexNet (Krizhevsky, 2014)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(*conv(64, 192, 5, norm=False), nn.MaxPool2d(3, 2), *conv(192, 384, norm=False)),
        *(*conv(384, 256, norm=False), *conv(256, 256, norm=False), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(9216, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000)),
    )


# Convolutions of each stage, by the network's number of layers with weights.
_VGG = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(depth: int, *, pooled: bool = False) -> nn.Module:
    """Return VGG-11, 16 or 19 (Simonyan and Zisserman, 2015).

    Args:
        depth: number of layers with weights.
        pooled: average-pool the last feature map to 7×7, as current torchvision does, so images need not be 224×224.
    """
    layers: list[nn.Module] = []
    before = 3
    for after, count in zip((64, 128, 256, 512, 512), _VGG[depth], strict=True):
        for _ in range(count):
            layers += conv(before, after, norm=False)
            before = after
        layers.append(nn.MaxPool2d(2))
    around = (nn.AdaptiveAvgPool2d(7),) if pooled else ()
    head = (nn.Linear(25088, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000))
    return nn.Sequential(*layers, *around, nn.Flatten(), *head)


class Join(nn.Module):
    """Branches of one input, concatenated or summed."""

    def __init__(self, *branches: nn.Module, join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined outputs of the branches."""
        return self.join([branch(x) for branch in self.branches])


def beside(*branches: nn.Module) -> Join:
    """Return branches whose outputs are concatenated along channels."""
    return Join(*branches, join=lambda parts: torch.cat(parts, 1))


def summed(*branches: nn.Module) -> Join:
    """Return branches whose outputs are summed."""
    return Join(*branches, join=lambda parts: parts[0] + parts[1])


def squeezenet() -> nn.Module:
    """Return SqueezeNet 1.1 (Iandola et al., 2016)."""

    def fire(before: int, squeezed: int, after: int) -> list[nn.Module]:
        wide = (nn.Sequential(*conv(squeezed, after, kernel, norm=False)) for kernel in (1, 3))
        return [*conv(before, squeezed, 1, norm=False), beside(*wide)]

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(True), pool(), *fire(64, 16, 64), *fire(128, 16, 64), pool()),
        *(*fire(128, 32, 128), *fire(256, 32, 128), pool(), *fire(256, 48, 192), *fire(384, 48, 192)),
        *(*fire(384, 64, 256), *fire(512, 64, 256), *conv(512, 1000, 1, norm=False), nn.AdaptiveAvgPool2d(1)),
    )


def resnet(*depths: int, bottleneck: bool, width: int = 64, small: bool = False, classes: int = 1000) -> nn.Module:
    """Return a ResNet (He et al., 2016), strides in the 3×3 convolutions.

    Args:
        depths: number of blocks in each stage.
        bottleneck: whether blocks are 1×1, 3×3, 1×1, with four times the channels at their ends.
        width: channels of the first stage.
        small: for small grey images: the first convolution is 3×3, and none of their pixels are pooled away.
        classes: scores that it returns.
    """
    layers = conv(1, width) if small else [*conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        after = 4 * inner if bottleneck else inner
        for i in range(depth):
            stride = 2 if stage and not i else 1
            if bottleneck:
                body = [*conv(before, inner, 1), *conv(inner, inner, 3, stride), *conv(inner, after, 1)[:2]]
            else:
                body = [*conv(before, inner, 3, stride), *conv(inner, after, 3)[:2]]
            around = conv(before, after, 1, stride)[:2] if before != after else []
            layers += [summed(nn.Sequential(*body), nn.Sequential(*around)), nn.ReLU(inplace=True)]
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def mobilenet() -> nn.Module:
    """Return MobileNet-v2 (Sandler et al., 2018), with ReLU."""
    layers = conv(3, 32, 3, 2)
    before = 32
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for times, after, count, first in rows:
        for i in range(count):
            inner, stride = before * times, 1 if i else first
            wider = conv(before, inner, 1) if times > 1 else []
            body = nn.Sequential(*wider, *conv(inner, inner, 3, stride, groups=inner), *conv(inner, after, 1)[:2])
            layers.append(summed(body, nn.Identity()) if stride == 1 and before == after else body)
            before = after
    return nn.Sequential(*layers, *conv(320, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


def densenet(*counts: int, growth: int = 32, start: int = 64) -> nn.Module:
    """Return a DenseNet (Huang et al., 2017).

    Args:
        counts: number of layers in each block.
        growth: channels that each layer adds.
        start: channels after the first convolution.
    """

    def first(before: int, after: int, kernel: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(before), nn.ReLU(True), nn.Conv2d(before, after, kernel, 1, kernel // 2, bias=False)]

    layers: list[nn.Module] = [*conv(3, start, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = start
    for stage, count in enumerate(counts):
        for _ in range(count):
            new = nn.Sequential(*first(channels, 4 * growth, 1), *first(4 * growth, growth, 3))
            layers.append(beside(nn.Identity(), new))
            channels += growth
        if stage < len(counts) - 1:
            layers += [*first(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    end = (nn.BatchNorm2d(channels), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(*layers, *end)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "AlexNet": alexnet,
    "ResNet-18": lambda: resnet(2, 2, 2, 2, bottleneck=False),
    "SqueezeNet-1.1": squeezenet,
    "MobileNet-v2": mobilenet,
    "ResNet-50": lambda: resnet(3, 4, 6, 3, bottleneck=True),
    "VGG-16": lambda: vgg(16),
    "ResNet-152": lambda: resnet(3, 8, 36, 3, bottleneck=True),
    "DenseNet-201": lambda: densenet(6, 12, 48, 32),
}

# Models of Appendix B of *Few-bit Backward*.
APPENDIX_B: dict[str, Callable[[], nn.Module]] = {
    "densenet121": lambda: densenet(6, 12, 24, 16),
    "densenet161": lambda: densenet(6, 12, 36, 24, growth=48, start=96),
    "densenet169": lambda: densenet(6, 12, 32, 32),
    "densenet201": lambda: densenet(6, 12, 48, 32),
    "vgg11": lambda: vgg(11, pooled=True),
    "vgg16": lambda: vgg(16, pooled=True),
    "vgg19": lambda: vgg(19, pooled=True),
}
