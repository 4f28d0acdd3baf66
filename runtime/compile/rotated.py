"""Rotated codes between compiled graphs: a few bits that train, by the ops of `Rotated` (quantizers/rotated.py).

    form = rotation_of(x, bits=2, most=128, unbiased=True, centered=False)     how the elements of x lie, and its codes
    parts = quantize(key, x, offsets=[0], forms=[form])                        codes and scales, and means of scores
    (x̂,) = dequantize(key, *parts, offsets=[0], forms=[form], dtype=x.dtype)

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
from ..backends.reference.rotated import buffer_size
from ..quantizers.per_group import LEAST_ROW
from ..tensors.rotation import GROUP_SIZES
from ..tensors.traits import DTYPES, KINDS
from .codes import cast_within, hint, memory_order


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
        """Return the bytes of the codes, scales and means of `x`."""
        rows = hint(x.numel()) // self.features
        samples = hint(x.shape[self.order[0]]) if len(self.order) - len(self.inner) > 1 else 1
        means = samples * self.features * 2 if self.centered else 0
        return rows * buffer_size(self.features, self.bits, self.group_size) + means


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


def quantize(key: Tensor, *xs: Tensor, offsets: Sequence[int], forms: Sequence[Rotation]) -> list[Tensor]:
    """Return what each of `xs` is saved as: buffers of codes, uint8 (…, bytes), then the means of those that have some.

    Args:
        key: of the step, int64 (1,).
        xs: the tensors to save, of one dtype; one call for all saves time.
        offsets: of each tensor's seed from the key.
        forms: of their codes.
    """
    rows, means = [], []
    for x, form in zip(xs, forms, strict=True):
        x = (x if x.dtype in KINDS else x.float()).permute(form.order)
        x = x.reshape(*x.shape[: x.dim() - len(form.inner)], form.features)
        if form.centered:
            of_sample = range(1 if x.dim() > 2 else 0, x.dim() - 1)  # where only rows are, all of them
            means.append(x.mean([*of_sample], keepdim=True, dtype=torch.float32).bfloat16())
            x = cast_within(x - means[-1], x.dtype)
        rows.append(x)
    bits, unbiased = [form.bits for form in forms], [form.unbiased for form in forms]
    return [*ops.rotated_quantize_buffers(rows, key, offsets, bits, unbiased, forms[0].group_size), *means]


def dequantize(
    key: Tensor, *parts: Tensor, offsets: Sequence[int], forms: Sequence[Rotation], dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors that `quantize` gave `parts` of, with the same key, offsets and forms."""
    buffers, means = parts[: len(forms)], iter(parts[len(forms) :])
    bits, features = [form.bits for form in forms], [form.features for form in forms]
    xs = []
    of_rows = dtype if dtype in DTYPES else torch.float32  # kernels write no 8 bits
    rows = ops.rotated_dequantize_buffers(buffers, key, offsets, bits, features, forms[0].group_size, of_rows)
    for x, form in zip(rows, forms, strict=True):
        if form.centered or of_rows != dtype:
            x = cast_within(x + next(means) if form.centered else x, dtype)
        x = x.reshape(*x.shape[:-1], *form.inner)
        xs.append(x.permute([form.order.index(d) for d in range(len(form.order))]))
    return xs
