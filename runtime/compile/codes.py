"""Codes of saved tensors: by the runtime's kernels, or in plain torch, which the compiler fuses into its own.

    groups = groups_of(x, most=256, multiple=2)       how the elements of x lie and are grouped
    parts = quantize(x, groups, bits=4, random=None)  planes of codes, minima and inverse scales
    x̂ = dequantize(parts, groups, bits=4, dtype=x.dtype)

`has_kernels` tells the devices of the first kind, where ops of `PerGroup`'s kernels are spliced into the graphs. That
is the CPU: its compiled loops read integers one vector at a time through memory, and take 7 ns for an element of 6
bits, there and back, where the kernels take 1.1. On all other devices the codes are those of this file.

The mathematics is that of `PerGroup` (quantizers/per_group.py): a group of minimum Z and range R has the codes
⌊B·(h − Z)/R + ξ⌋ of B = 2^b − 1, and Z and R are saved in bfloat16 so that [Z, Z + R] covers the group. What
differs, for speed, is in both kinds

    ξ         stochastic: one random number a group, rotated by the golden ratio from element to element. Each ξ is
              uniform, so x̂ is unbiased as PerGroup's is, and groups are independent; elements of a group are not.
              nearest: ½.

and in the loops that the compiler writes

    scale     B/R is saved in place of R, and a constant group is its Z in bfloat16 (exact for zeros).
    packing   a code is cut into planes of 4, 2 and 1 bits, in floating point, and a plane is folded: of 4-bit codes
              the first half of a group lies in the low bits of its bytes, the second half in the high. So the loops
              stay vectorized: no integer shift, and neighbours stay neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor

from .. import ops
from ..quantizers.per_group import LEAST_ROW
from ..tensors.dtypes import KINDS
from ..tensors.packing import GROUP

GOLDEN = 0.6180339887498949
LEAST_SCALE = 2.0**-100
UNKNOWN = 8192  # as Inductor takes it


@dataclass(frozen=True)
class Groups:
    """How a dense tensor's elements are grouped.

    Attributes:
        order: the tensor's dimensions in memory order.
        inner: static sizes of the last of them, which are flattened; the dimensions before stay as they are.
        size: G, elements of a group; it divides the product of `inner`.
    """

    order: tuple[int, ...]
    inner: tuple[int, ...]
    size: int

    @property
    def count(self) -> int:
        """Number of groups in one flattened inner part."""
        return prod(self.inner) // self.size

    def rows(self, x: Tensor) -> Tensor:
        """Return `x` as (…, count, size)."""
        x = x.permute(self.order)
        outer = x.shape[: x.dim() - len(self.inner)]
        return x.reshape(*outer, self.count, self.size)

    def restore(self, rows: Tensor) -> Tensor:
        """Return (…, count, size in any number of dimensions) in the shape of the tensor."""
        outer = rows.shape[: len(self.order) - len(self.inner)]
        x = written(rows, (*outer, *self.inner))
        return x.permute([self.order.index(d) for d in range(len(self.order))])


Form = tuple[Groups, int]
"""Groups and bits, 1 to 8, of a tensor's codes."""


def written(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the contiguous `x` in another shape, by way of memory.

    Compilers fuse through a view, and then walk both shapes in one loop that divides indices; they do not fuse through
    `as_strided`.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return x.contiguous().as_strided(tuple(shape), tuple(strides))


def groups_of(x: Tensor, most: int, multiple: int) -> Groups | None:
    """Return the groups of `x`, a tensor of the compiler's with or without symbolic sizes, or None if it has none.

    The size of groups is the largest divisor of the innermost dimension that is a multiple of `multiple` and at most
    `most`, or a power of two that is more than half of it; where that dimension has fewer than 64 elements, further
    ones join it. So no group reaches over tokens.
    """
    order = memory_order(x)
    if order is None:
        return None
    inner: list[int] = []
    for dimension in reversed(order):
        size = x.shape[dimension]
        if not isinstance(size, int):
            break
        inner.insert(0, size)
        if prod(inner) >= LEAST_ROW and (found := _divisor(prod(inner), most, multiple)):
            return Groups(tuple(order), tuple(inner), found)
    found = _divisor(prod(inner), most, multiple) if inner else 0
    return Groups(tuple(order), tuple(inner), found) if found >= min(LEAST_ROW // 2, most) else None


def _divisor(n: int, most: int, multiple: int) -> int:
    """Return a large divisor of n that is a multiple of `multiple` and at most `most`; 0 if below 32 or none.

    A power of two, if one is more than half of the largest: kernels are made for them, and a group of 88 takes twice
    the time of one of 64.
    """
    sizes = range(min(most, n) // multiple * multiple, min(LEAST_ROW // 2, most) - 1, -multiple)
    divisors = [g for g in sizes if g > 0 and n % g == 0]
    return next((g for g in divisors if g & (g - 1) == 0 and 2 * g > divisors[0]), divisors[0] if divisors else 0)


def memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions of a dense tensor from the outermost in memory to the innermost, None if it has gaps.

    By the values that symbolic sizes have in the example: tensors/layout.py would ask them, and so fix them.
    """
    hints = [hint(s) for s in x.stride()]
    order = sorted(range(x.dim()), key=lambda d: (-hints[d], d) if hint(x.shape[d]) != 1 else (-(10**18), d))
    expected = 1
    for d in reversed(order):
        if hint(x.shape[d]) != 1 and hints[d] != expected:
            return None
        expected *= hint(x.shape[d])
    return order


def hint(size: Any) -> int:
    """Return a size, or the value that a symbolic one has in the example being compiled.

    Sizes that depend on data, such as the number of chosen rows, have none: there each symbol stands for `UNKNOWN`.
    """
    if isinstance(size, int):
        return size
    known = size.node.hint
    if known is None:
        known = size.node.expr.xreplace(dict.fromkeys(size.node.expr.free_symbols, sympy.Integer(UNKNOWN)))
    return int(known)


def planes_of(bits: int) -> list[int]:
    """Return the widths of the planes that codes of `bits` bits are cut into, from the lowest: powers of two."""
    return [w for w in (8, 4, 2, 1) if bits & w]


def has_kernels(device: torch.device, dtype: torch.dtype, groups: Groups) -> bool:
    """Return whether `quantize_by_kernel` takes such tensors, and is faster than compiled loops."""
    return device.type == "cpu" and dtype in KINDS and prod(groups.inner) % GROUP == 0


def quantize_by_kernel(
    xs: Sequence[Tensor], seeds: Tensor | None, forms: Sequence[Form], stochastic: Sequence[bool]
) -> list[Tensor]:
    """Return minima, ranges and codes of each of `xs` in one buffer, uint8: those of `PerGroup`, but for ξ.

    Args:
        xs: N tensors to save; one call for all saves time.
        seeds: int64 (N,), of stochastic rounding; None if there is none.
        forms: of their codes.
        stochastic: whether each is rounded at random, or to nearest.
    """
    rows = [groups.rows(x).flatten(-2) for x, (groups, _) in zip(xs, forms, strict=True)]
    bits, sizes = [b for _, b in forms], [groups.size for groups, _ in forms]
    return ops.per_group_quantize_buffers(rows, bits, sizes, seeds, list(stochastic))


def dequantize_by_kernel(buffers: Sequence[Tensor], forms: Sequence[Form], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors that `quantize_by_kernel` gave the buffers of; all are of one dtype."""
    bits, sizes = [b for _, b in forms], [groups.size for groups, _ in forms]
    rows = ops.per_group_dequantize_buffers(list(buffers), bits, sizes, dtype)
    return [
        groups.restore(part.unflatten(-1, (groups.count, groups.size)))
        for part, (groups, _) in zip(rows, forms, strict=True)
    ]


def quantize(x: Tensor, groups: Groups, bits: int, random: Tensor | None) -> tuple[Tensor, ...]:
    """Return planes of codes, uint8 (…, count, size·width/8) each, minima and inverse scales, bfloat16 (…, count, 1).

    Args:
        x: the tensor to save.
        groups: its groups.
        bits: b, 1 to 8.
        random: numbers uniform in [0, 1), (…, count, 1), for stochastic rounding; None rounds to nearest.
    """
    top = float(2**bits - 1)
    h = groups.rows(x).float()
    low, high = h.amin(-1, True), h.amax(-1, True)
    low = _bfloat16_below(low)
    inverse_scale = _bfloat16_below(top / (high - low).clamp_min(top * LEAST_SCALE))
    low, inverse_scale = (written(p.bfloat16(), p.shape) for p in (low, inverse_scale))
    u = (h - low.float()) * inverse_scale.float()
    if random is None:
        codes = (u + 0.5).floor()
    else:
        turned = random + torch.arange(groups.size, device=x.device).float() * GOLDEN
        codes = (u + (turned - turned.floor())).floor()
    # In memory a byte each, where several planes or the halves of one read them: compilers would write float32.
    codes = codes.clamp(0.0, top).to(torch.uint8)
    return (*_to_planes(codes if bits == 8 else written(codes, codes.shape).float(), bits), low, inverse_scale)


def dequantize(parts: Sequence[Tensor], groups: Groups, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor that `quantize` gave `parts` of."""
    *planes, low, inverse_scale = parts
    codes = _from_planes(planes, groups, bits)
    inverse_scale, low = (
        p.float().view(*p.shape[:-1], *[1] * (codes.dim() - p.dim() + 1)) for p in (inverse_scale, low)
    )
    return groups.restore((codes / inverse_scale + low).to(dtype))


def pack_bools(x: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """Return the truth values of `x` in a bit each, uint8 (…, count, size/8)."""
    return (_folded(groups.rows(x).float(), 1),)


def unpack_bools(parts: Sequence[Tensor], groups: Groups) -> Tensor:
    """Return the truth values that `pack_bools` packed."""
    return groups.restore(_from_planes(parts, groups, 1) > 0.5)


def _bfloat16_below(x: Tensor) -> Tensor:
    """Return a number of bfloat16 at most `x`, float32, less than two units in the last place below; 0 for 0."""
    return _bfloat16(x - x.abs() * 2.0**-8)


def _bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16 in the bits of float32: compilers drop a cast to bfloat16 and back inside a kernel."""
    pattern = x.view(torch.int32)
    return ((pattern + 0x8000) & -0x10000).view(torch.float32)


def _to_planes(codes: Tensor, bits: int) -> list[Tensor]:
    planes = []
    for width in planes_of(bits):
        if width == bits:  # the last: nothing is left above it
            planes.append(_folded(codes, width))
            break
        rest = (codes * 2.0**-width).floor()
        planes.append(_folded(codes - rest * 2.0**width, width))
        codes, bits = rest, bits - width
    return planes


def _folded(plane: Tensor, width: int) -> Tensor:
    """Return numbers of `width` bits (…, size) in bytes (…, size·width/8)."""
    while width < 8:
        half = plane.shape[-1] // 2
        plane = plane[..., :half] + plane[..., half:] * 2.0**width
        width *= 2
    return plane.to(torch.uint8)


def _from_planes(planes: Sequence[Tensor], groups: Groups, bits: int) -> Tensor:
    """Return the codes as float32, (…, count, 2, …, 2, ·): a dimension of 2 for each fold of the narrowest plane."""
    widths = planes_of(bits)
    folds = _folds(widths[-1])
    codes = None
    for i, (plane, width) in enumerate(zip(planes, widths, strict=True)):
        part = _unfolded(plane.float(), width)
        part = part.reshape(*part.shape[:-1], *[2] * (folds - _folds(width)), groups.size >> folds)
        weight = 2.0 ** sum(widths[:i])
        codes = part if codes is None else codes + part * weight
    assert codes is not None
    return codes


def _folds(width: int) -> int:
    return {8: 0, 4: 1, 2: 2, 1: 3}[width]


def _unfolded(numbers: Tensor, width: int) -> Tensor:
    """Return the numbers of `width` bits that `_folded` put into bytes: (…, 2, …, 2, ·), a dimension of 2 a fold.

    Written as a broadcast and not as `cat`, which would make the compiler write a copy. The factor 2^-shift does not
    depend on the last dimension, so that it stays outside of the innermost loop.
    """
    folds = _folds(width)
    if not folds:
        return numbers
    half = torch.arange(2, device=numbers.device).float()
    factor = torch.ones([], device=numbers.device)
    for fold in range(folds):
        down = 1.0 - half * (1.0 - 2.0 ** -(width << fold))  # 1 for the lower half, 2^-shift for the upper
        factor = factor * down.view([2 if d == fold else 1 for d in range(folds)] + [1])
    numbers = numbers.view(*numbers.shape[:-1], *[1] * folds, numbers.shape[-1])
    moved = (numbers * factor).floor()
    return moved - (moved * 2.0**-width).floor() * 2.0**width
