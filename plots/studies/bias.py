"""Bias of the gradients of ActNN's layers, by averaging many draws of the same gradient.

    python -m fewbit.plots.studies.bias > actnn-bias.json

Stochastic rounding is unbiased, so a gradient that is linear in the saved tensor is unbiased too. Where a saved tensor
enters twice (the input gradient of a normalization or a softmax from one copy) or through a softmax (attention), the
gradient is biased. With ḡ the mean of N draws of a gradient whose exact value is g:

    noise² = Σ ‖gᵢ − ḡ‖² / (N − 1) / ‖g‖²        bias² = ‖ḡ − g‖² / ‖g‖² − noise² / N

The second term is the expected error of ḡ without any bias, so the estimate of bias² is around 0 if there is none.
`resolution` is three standard deviations of that estimate if the errors of all elements were independent. Those of a
group are not: two copies, which have no bias, reach up to twice the resolution.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ...runtime import layers
from ...runtime.layers.attention import scaled_dot_product_attention
from ...runtime.layers.saver import QuantizerSaver
from ...runtime.quantizers import PerGroup
from .. import compact_json


@dataclass(frozen=True)
class Bias:
    """Bias of one layer's input gradient.

    Attributes:
        layer: its name and size.
        bits: bits of the saved tensor.
        copies: copies of the saved tensor; None if the layer has no such option.
        noise: of one draw, relative to the gradient's norm.
        bias: of the mean of all draws, likewise; 0 if the estimate of its square is negative.
        resolution: smallest detectable bias if the errors of elements were independent.
    """

    layer: str
    bits: int
    copies: int | None
    noise: float
    bias: float
    resolution: float


Forward = Callable[[Tensor], Tensor]


def cases(bits: int) -> Iterator[tuple[str, int | None, Forward, Forward, tuple[int, ...]]]:
    """Yield name, copies, the exact forward, the compressed one and the shape of the input of each layer."""
    linear = nn.Linear(64, 64)
    compressed = layers.Linear(64, 64, bits=bits)
    compressed.load_state_dict(linear.state_dict())
    yield "Linear(64), of its weight", None, linear, compressed, (128, 64)
    for copies in (1, 2):
        for width in (64, 256):
            norm = layers.LayerNorm(width, bits=bits, copies=copies)
            yield f"LayerNorm({width})", copies, nn.LayerNorm(width), norm, (64, width)
        batch = layers.BatchNorm2d(8, bits=bits, copies=copies)
        yield "BatchNorm2d(8), 16 images of 8×8", copies, nn.BatchNorm2d(8), batch, (16, 8, 8, 8)
        for width in (64, 256):
            soft = layers.Softmax(-1, bits=bits, copies=copies)
            yield f"Softmax over {width}", copies, nn.Softmax(-1), soft, (64, width)
    saver = QuantizerSaver(PerGroup(bits=bits))

    def few(x: Tensor) -> Tensor:
        q, k, v = x.unbind(0)
        return scaled_dot_product_attention(q, k, v, saver)

    def exact(x: Tensor) -> Tensor:
        q, k, v = x.unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v)

    yield "attention, 4 heads of 32, 64 tokens", None, exact, few, (3, 2, 4, 64, 32)


def measure(
    name: str, copies: int | None, exact: Forward, few: Forward, shape: tuple[int, ...], bits: int, draws: int
) -> Bias:
    """Return the bias of one layer's gradient, from `draws` draws."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw).requires_grad_()
    g = torch.randn(exact(x).shape, generator=draw)

    def gradient(forward: Forward) -> Tensor:
        wanted = forward.weight if isinstance(forward, nn.Linear) else x
        return torch.autograd.grad(forward(x), wanted, g)[0].double()

    true = gradient(exact)
    norm = true.square().sum()
    off, squares = torch.zeros_like(true), 0.0
    for _ in range(draws):
        difference = gradient(few) - true
        off += difference
        squares += float(difference.square().sum())
    off /= draws
    noise = float((squares - draws * off.square().sum()) / (draws - 1) / norm)
    bias = float(off.square().sum() / norm) - noise / draws
    # Estimate of bias² without a bias: noise / draws times √(2 / size), three standard deviations of it.
    resolution = math.sqrt(3 * noise / draws * math.sqrt(2 / true.numel()))
    return Bias(name, bits, copies, math.sqrt(noise), math.sqrt(max(0.0, bias)), resolution)


def table(draws: int = 200) -> list[Bias]:
    """Return the bias of every layer at 4 and 2 bits."""
    torch.manual_seed(0)
    return [measure(*case, bits, draws) for bits in (4, 2) for case in cases(bits)]


if __name__ == "__main__":
    print(compact_json.dumps({"draws": 200, "rows": [asdict(row) for row in table(200)]}), end="")
