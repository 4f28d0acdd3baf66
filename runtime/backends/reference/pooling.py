"""Max pooling that records the place of each maximum within its window, a byte, in place of its index in the image."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...tensors.traits import arithmetic_dtype

_PARTS = 8  # into which images are divided, so that indices, of 64 bits, take little memory

MAX_POOL: dict[int, Any] = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """Return torch's output and the places of the maxima, uint8 of its shape, row-major.

    Args:
        x: batched or a single image.
        kernel, stride, padding, dilation: a number for each of 1 to 3 dimensions; at most 256 places in a window.
        ceil_mode: torch's own.
    """
    y, indices = MAX_POOL[len(kernel)](x, kernel, stride, padding, dilation, ceil_mode)
    _, corners, places = window(x, y.shape, kernel, stride, padding, dilation)
    return y, places[indices.sub_(corners)].contiguous()


def max_pool_backward(
    grad: Tensor,
    places: Tensor,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of the input, of this `shape`: the sums of `grad` at the maxima, row-major."""
    dimensions = len(kernel)
    size, outputs = math.prod(shape[-dimensions:]), math.prod(places.shape[-dimensions:])
    grad_x = grad.new_zeros(math.prod(shape[:-dimensions]), size)
    offsets, corners = offsets_of(shape, places.shape, kernel, stride, padding, dilation, places.device)
    grad, places, corners = grad.reshape(-1, outputs), places.reshape(-1, outputs), corners.flatten()
    for there, at, g in zip(*(x.chunk(_PARTS) for x in (grad_x, places, grad)), strict=True):
        indices = offsets[at.int().clamp_(max=offsets.numel() - 1)].add_(corners).clamp_(0, size - 1)
        # Torch's pooling sums numbers of 16 bits in float32; a GPU's scatter rounds after each, in any order.
        sums = there.to(arithmetic_dtype(there.dtype)).scatter_add_(-1, indices, g.to(arithmetic_dtype(g.dtype)))
        if sums.dtype != there.dtype:
            there.copy_(sums)
    return grad_x.view(shape)


def window(
    x: Tensor,
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `offsets_of`, and the place at each distance from a corner, uint8."""
    offsets, corners = offsets_of(x.shape, outputs, kernel, stride, padding, dilation, x.device)
    # From the corner of a window to its last place in memory.
    widths = {d: math.prod(x.shape[d + 1 :] if d < -1 else ()) for d in range(-len(kernel), 0)}
    reach = sum((kernel[d] - 1) * dilation[d] * width for d, width in widths.items())
    places = torch.zeros(reach + 1, dtype=torch.uint8, device=x.device)
    places[offsets] = torch.arange(offsets.numel(), dtype=torch.uint8, device=x.device)
    return offsets, corners, places


def offsets_of(
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the offsets of places in a window and of windows in an image, in elements of an image's memory: int64.

    Returns:
        offsets: of each place from the corner of its window, (places,).
        corners: of each window, negative in the padding, with as many dimensions as `kernel`.
    """
    offsets, corners = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), dtype=torch.long, device=device)
    width = 1
    for dim in range(-1, -len(kernel) - 1, -1):
        steps = torch.arange(kernel[dim], device=device) * dilation[dim] * width
        offsets = (steps.unsqueeze(1) + offsets).flatten()
        starts = (torch.arange(outputs[dim], device=device) * stride[dim] - padding[dim]) * width
        corners = corners + starts.view(-1, *(1 for _ in range(-dim - 1)))
        width *= inputs[dim]
    return offsets, corners
