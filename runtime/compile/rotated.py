"""Rotated codes between compiled graphs: a few bits that train, by the ops of `Rotated` (quantizers/rotated.py).

    form = rotation_of(x, bits=2, most=128, role=role)     how the elements of x lie, and its codes
    parts = quantize(x, seed, form)                        codes, scales, seed, and of scores the mean over tokens
    x̂ = dequantize(parts, form, dtype=x.dtype)

At 1 to 3 bits a group's minimum and maximum are far apart for what lies between them: the error of 2 bits, rounded at
random, is .50 of |x|² for normal numbers, .87 for Laplace's and 2.6 where channels stand out. Turned at random every
group is normal, and has .133, whatever its values; at 3 bits .036. From 4 bits on groups between their minimum and
maximum take a third of the time and err little.

    scale   what enters the gradient linearly has the scale that makes its mean right, the rest that of least error.
    center  of queries and keys the mean over tokens is taken out, and saved in bfloat16: for keys it moves no
            probability, and what is left is shorter. Small Llamas ended .052 above exact training without, .022 with.

Ops and no loops of the compiler's: sums and differences over a group would have a kernel for each of 14 passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .. import ops
from ..quantizers.per_group import LEAST_ROW
from ..tensors.dtypes import KINDS
from ..tensors.packing import packed_size
from ..tensors.rotation import GROUP_SIZES, groups_of
from .codes import hint, memory_order

TURNS = 2


@dataclass(frozen=True)
class Rotation:
    """How a dense tensor lies in rows, and the codes of their groups.

    Attributes:
        order: the tensor's dimensions in memory order.
        inner: static sizes of the last of them, which are a row.
        bits: b, 1 to 8.
        group_size: G, of the groups of a row.
        unbiased: whether the mean of what comes back is right, or its error the least.
        centered: whether the mean over the rows of a sample is taken out.
    """

    order: tuple[int, ...]
    inner: tuple[int, ...]
    bits: int
    group_size: int
    unbiased: bool
    centered: bool

    @property
    def features(self) -> int:
        """Elements of a row."""
        return prod(self.inner)

    def nbytes(self, x: Tensor) -> int:
        """Return the bytes of the codes, scales, seed and means of `x`."""
        rows = hint(x.numel()) // self.features
        of_row = packed_size(self.features, self.bits) + 2 * groups_of(self.features, self.group_size)
        means = self.samples(x) * self.features * 2 if self.centered else 0
        return rows * of_row + 8 + means

    def samples(self, x: Tensor) -> int:
        """Return how many means `x` has: one for each element of its outermost dimension, if rows lie within it."""
        outer = len(self.order) - len(self.inner)
        return hint(x.shape[self.order[0]]) if outer > 1 else 1


def rotation_of(x: Tensor, bits: int, most: int, *, unbiased: bool, centered: bool) -> Rotation | None:
    """Return the rows of `x`, a tensor of the compiler's, or None if fewer than 64 elements lie together in memory.

    Args:
        x: with or without symbolic sizes.
        bits: of its codes.
        most: elements of a group.
        unbiased: of the scale.
        centered: whether the mean over rows is taken out.
    """
    order = memory_order(x)
    inner: list[int] = []
    for dimension in reversed(order or ()):
        size = x.shape[dimension]
        if not isinstance(size, int) or prod(inner) >= LEAST_ROW:
            break
        inner.insert(0, size)
    if order is None or prod(inner) < LEAST_ROW:
        return None
    group_size = max(size for size in GROUP_SIZES if size <= max(most, GROUP_SIZES[0]))
    return Rotation(tuple(order), tuple(inner), bits, group_size, unbiased, centered and len(inner) < len(order))


def quantize(x: Tensor, seed: Tensor, form: Rotation) -> tuple[Tensor, ...]:
    """Return codes, uint8 (…, bytes), scales, bfloat16 (…, groups), the seed, int64 (1,), and means if there are any.

    Args:
        x: the tensor to save.
        seed: of the signs, int64 ().
        form: of its codes.
    """
    x = x.permute(form.order)
    outer = x.shape[: x.dim() - len(form.inner)]
    rows = x.reshape(*outer, form.features)
    seed = seed.reshape(1)
    means = ()
    if form.centered:
        means = (rows.mean(_rows_of_sample(rows), keepdim=True, dtype=torch.float32).bfloat16(),)
        rows = rows - means[0]
    rows = rows.reshape(-1, form.features)
    rows = rows if rows.dtype in KINDS else rows.float()
    packed, scale = ops.rotated_quantize(rows, seed, form.bits, form.group_size, TURNS, form.unbiased)
    return (packed.view(*outer, packed.shape[-1]), scale.view(*outer, scale.shape[-1]), seed, *means)


def dequantize(parts: Sequence[Tensor], form: Rotation, dtype: torch.dtype) -> Tensor:
    """Return the tensor that `quantize` gave `parts` of."""
    packed, scale, seed, *means = parts
    outer = packed.shape[:-1]
    how = (form.bits, form.group_size, TURNS, form.features)
    flat = packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1])
    rows = ops.rotated_dequantize(*flat, seed, *how, dtype).view(*outer, form.features)
    if means:
        rows = (rows + means[0]).to(dtype)
    x = rows.reshape(*outer, *form.inner)
    return x.permute([form.order.index(d) for d in range(len(form.order))])


def _rows_of_sample(rows: Tensor) -> list[int]:
    """Return the dimensions over which a sample's rows lie: all but the outermost, or that one if it is the only."""
    return list(range(1 if rows.dim() > 2 else 0, rows.dim() - 1))
