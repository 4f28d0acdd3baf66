"""Copies of tensors in the codes of `Rotated`, as tensors that autograd saves: for gated linear units and their inputs.

    copies = compress([up, activated], [3, 3])              codes with their scales, a tensor each, and the key of all
    up, activated = decompress(copies, [3, 3], gate.shape, gate.dtype)

Two copies are turned by signs of their own, so that the mean of their product is right too. Groups of 128 lie in the
rows of the last dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..quantizers import Rotated
from ..tensors.dtypes import as_kind

_GROUP_SIZE = Rotated.group_size


def compress(xs: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, ...]:
    """Return for each of `xs` a buffer of its codes in so many bits, and at the end the key of their signs."""
    key = ops.draw_seeds(xs[0], 1)
    rows = [as_kind(x.reshape(-1, _features(x.shape)), keep_positive=False) for x in xs]
    buffers = ops.rotated_quantize_buffers(rows, key, [*range(len(xs))], bits, [True] * len(xs), _GROUP_SIZE)
    return (*buffers, key)


def decompress(copies: Sequence[Tensor], bits: Sequence[int], shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors, all of one shape, that `compress` gave `copies` of."""
    *buffers, key = copies
    features = [_features(shape)] * len(buffers)
    rows = ops.rotated_dequantize_buffers(buffers, key, [*range(len(bits))], bits, features, _GROUP_SIZE, dtype)
    return [x.view(shape) for x in rows]


def _features(shape: torch.Size) -> int:
    return max(1, shape[-1]) if shape else 1
