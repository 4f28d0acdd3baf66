"""Max pooling that keeps a byte for each output.

max_pool(x, kernel, stride, padding, dilation, ceil_mode) -> y, places    the place of each maximum in its window
max_pool_backward(grad, places, shape, kernel, stride, padding, dilation) -> gradient of x
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...tables import FewbitError
from ..backends.reference.pooling import MAX_POOL
from ..tensors.validation import shown_part
from .declare import Call, declare

Sizes = Sequence[int]

_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation"


@declare(f"max_pool(Tensor x, {_WINDOW}, bool ceil_mode) -> (Tensor, Tensor)", "pooling.max_pool")
def max_pool(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool) -> Call:
    """Return the maxima and the place of each in its window, uint8."""
    window = (kernel, stride, padding, dilation)
    _check_window(x, *window)

    def fake() -> tuple[Tensor, Tensor]:
        y, _ = MAX_POOL[len(kernel)](x, *window, ceil_mode)
        return y, y.new_empty(y.shape, dtype=torch.uint8)

    return Call(fake=fake, run=lambda pool: pool(x, *window, ceil_mode))


@declare(
    f"max_pool_backward(Tensor grad, Tensor places, SymInt[] shape, {_WINDOW}) -> Tensor", "pooling.max_pool_backward"
)
def max_pool_backward(
    grad: Tensor, places: Tensor, shape: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Call:
    """Return the gradient of the input of this `shape`."""
    window = (kernel, stride, padding, dilation)
    _check_window(grad, *window)
    check_places(grad, places)
    d = len(kernel)
    fits = len(shape) == grad.dim() and list(shape[:-d]) == list(grad.shape[:-d])
    for size, out, k, s, p, e in zip(shape[-d:], grad.shape[-d:], kernel, stride, padding, dilation, strict=True):
        # The last window begins within the padded input.
        fits = fits and s > 0 and e > 0 and 0 <= p <= k // 2 and size > 0 and out > 0 and (out - 1) * s < size + p
    if not fits:
        raise FewbitError(f"max_pool_backward: outputs {tuple(grad.shape)} are not those of an input {tuple(shape)}")
    return Call(
        fake=lambda: grad.new_empty(shape),
        run=lambda scatter: scatter(grad, places.contiguous(), shape, *window),
    )


def check_places(grad: Tensor, places: Tensor) -> None:
    """Raise FewbitError unless `places` are those of an output of the shape of `grad`."""
    if places.dtype != torch.uint8 or places.shape != grad.shape or places.device != grad.device:
        raise FewbitError(f"MaxPool: places are uint8 {tuple(grad.shape)}, not {shown_part(places)}")


def _check_window(x: Tensor, kernel: Sizes, *others: Sizes) -> None:
    """Raise FewbitError unless `x` has the dimensions of a max pooling whose places fit into a byte."""
    d = len(kernel)
    if d not in (1, 2, 3) or any(len(other) != d for other in others) or not 1 <= math.prod(kernel) <= 256:
        raise FewbitError(f"max_pool takes windows of 1 to 3 dimensions and at most 256 places, not {list(kernel)}")
    if x.dim() not in (d + 1, d + 2) or not x.is_floating_point():
        raise FewbitError(
            f"max_pool takes floating-point tensors of {d + 1} or {d + 2} dimensions, not {shown_part(x)}"
        )
