"""Codes of saved tensors: by the runtime's kernels, or in plain torch, which the compiler fuses into its own.

    groups = groups_of(x, most=256, multiple=2)       how the elements of x lie and are grouped
    parts = quantize(x, groups, bits=4, random=None)  planes of codes, minima and inverse scales
    x̂ = dequantize(*parts, groups=groups, bits=4, dtype=x.dtype)

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

    scale     R/B is saved in place of R, and a constant group is its Z in bfloat16 (exact for zeros).
    packing   planes.py says how codes of a device lie in bytes.
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
from ..tensors.packing import GROUP
from ..tensors.traits import KINDS, largest
from .planes import BLOCK, fold, pack, pack_block, unpack, written
from .triton_store import writes_triton

GOLDEN = 0.6180339887498949  # whose multiples are spread evenly over [0, 1), wherever they begin
LEAST_STEP = 2.0**-100  # of a constant group, whose 1 / step is to be finite
UNKNOWN = 8192  # as Inductor takes it
_LARGEST = largest(torch.bfloat16)


@dataclass(frozen=True)
class Groups:
    """How a dense tensor's elements are grouped.

    Attributes:
        order: the tensor's dimensions in memory order.
        inner: static sizes of the last of them, which are flattened; the dimensions before stay as they are.
        size: G, elements of a group; it divides the product of `inner`.
        blocks: whether 8 neighbours share the bytes of their codes, as Triton's kernels pack them, or a group's halves.
    """

    order: tuple[int, ...]
    inner: tuple[int, ...]
    size: int
    blocks: bool = False

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


def groups_of(x: Tensor, most: int, multiple: int) -> Groups | None:
    """Return the groups of `x`, a tensor of the compiler's with or without symbolic sizes, or None if it has none.

    The size of groups is the largest divisor of the innermost dimension that is a multiple of `multiple` and at most
    `most`, or a power of two that is more than half of it; where that dimension has fewer than 64 elements, further
    ones join it. So no group reaches over tokens.
    """
    blocks = writes_triton(x.device)
    multiple = BLOCK if blocks else multiple
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
            return Groups(tuple(order), tuple(inner), found, blocks)
    found = _divisor(prod(inner), most, multiple) if inner else 0
    return Groups(tuple(order), tuple(inner), found, blocks) if found >= min(LEAST_ROW // 2, most) else None


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

    By the values that symbolic sizes have in the example: tensors/spec.py would ask them, and so fix them.
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


def has_kernels(device: torch.device, dtype: torch.dtype, groups: Groups) -> bool:
    """Return whether `quantize_by_kernel` takes such tensors, and is faster than compiled loops."""
    return device.type == "cpu" and dtype in KINDS and prod(groups.inner) % GROUP == 0


def quantize_by_kernel(*inputs: Tensor, forms: Sequence[Form], stochastic: Sequence[bool]) -> list[Tensor]:
    """Return minima, ranges and codes of each tensor in one buffer, uint8: those of `PerGroup`, but for ξ.

    Args:
        inputs: N tensors to save, as one call for all saves time; then, if any is rounded at random, seeds, int64 (N,).
        forms: of their codes.
        stochastic: whether each is rounded at random, or to nearest.
    """
    xs, seeds = inputs[: len(forms)], inputs[len(forms) :]
    rows = [groups.rows(x).flatten(-2) for x, (groups, _) in zip(xs, forms, strict=True)]
    bits, sizes = [b for _, b in forms], [groups.size for groups, _ in forms]
    return ops.per_group_quantize_buffers(rows, bits, sizes, seeds[0] if seeds else None, list(stochastic))


def dequantize_by_kernel(*buffers: Tensor, forms: Sequence[Form], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors that `quantize_by_kernel` gave the buffers of; all are of one dtype."""
    bits, sizes = [b for _, b in forms], [groups.size for groups, _ in forms]
    rows = ops.per_group_dequantize_buffers(list(buffers), bits, sizes, dtype)
    return [
        groups.restore(part.unflatten(-1, (groups.count, groups.size)))
        for part, (groups, _) in zip(rows, forms, strict=True)
    ]


def quantize(x: Tensor, groups: Groups, bits: int, random: Tensor | None) -> tuple[Tensor, ...]:
    """Return planes of codes, uint8 (…, count, size·width/8) each, minima and steps, bfloat16 (…, count, 1).

    Args:
        x: the tensor to save.
        groups: its groups.
        bits: b, 1 to 8.
        random: numbers uniform in [0, 1), (…, count, 1), for stochastic rounding; None rounds to nearest.
    """
    top = 2**bits - 1
    h = groups.rows(x).float()
    order = _order(h.view(torch.int32))
    low, high = (_order(o).view(torch.float32) for o in (order.amin(-1, True), order.amax(-1, True)))
    low = _bfloat16_below(low)
    step = -_bfloat16_below((low - high) * (1 / top)).clamp_max(-LEAST_STEP)
    most = ((_LARGEST - low.clamp_min(0)) * (1 / top)).view(torch.int32) & -0x10000  # of more, levels are infinite
    step = torch.minimum(step, most.view(torch.float32))
    low, step = (written(p.bfloat16()) for p in (low, step))
    u = (h - low.float()) * (1.0 / step.float()) + (0.5 if random is None else _noise(random, groups.size))
    # Never negative, so that the cast is the floor; one in floating point is among the slowest instructions of a GPU.
    codes = u.to(torch.int32).clamp_max(top)
    return (*pack(codes, bits, groups.blocks), low, step)


def dequantize(*parts: Tensor, groups: Groups, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor that `quantize` gave `parts` of."""
    *planes, low, step = parts
    codes = unpack(planes, bits, groups.blocks)
    step, low = (p.float().view(*p.shape[:-1], *[1] * (codes.dim() - p.dim() + 1)) for p in (step, low))
    return groups.restore(cast_within(codes * step + low, dtype))


def cast_within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in another dtype, within its range.

    Levels lie up to 1.6 % beyond a group's values, and turned ones anywhere: those of 65,504 in float16 came back as
    infinity, and those of 448 in float8 would as NaN.
    """
    most = largest(dtype)
    return (x.clamp(-most, most) if most < _LARGEST else x).to(dtype)


def pack_bools(x: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """Return the truth values of `x` in a bit each, uint8 (…, count, size/8)."""
    rows = groups.rows(x)
    return (pack_block(rows.to(torch.int32), 1) if groups.blocks else fold(rows.float(), 1),)


def unpack_bools(*parts: Tensor, groups: Groups) -> Tensor:
    """Return the truth values that `pack_bools` packed."""
    return groups.restore(unpack(parts, 1, groups.blocks) > 0.5)


def _noise(random: Tensor, size: int) -> Tensor:
    """Return ξ, (…, count, size): of the j-th element of a group the fraction of its random number + j·golden ratio.

    In integers of as many bits as do not overflow, and put into the fraction of a number in [1, 2).
    """
    digits = min(23, 30 - size.bit_length())
    one = 1 << digits
    turns = torch.arange(size, dtype=torch.int32, device=random.device) * round(GOLDEN * one)
    fraction = ((random * one).to(torch.int32) + turns & one - 1) << 23 - digits
    return (fraction | 0x3F800000).view(torch.float32) - 1.0


def _order(pattern: Tensor) -> Tensor:
    """Return integers in the order of the float32 numbers with these bits, and of these integers the bits.

    The least of integers is one instruction of a GPU; that of numbers is three, as one of them may be NaN.
    """
    return pattern ^ (pattern >> 31 & 0x7FFFFFFF)


def _bfloat16_below(x: Tensor) -> Tensor:
    """Return a number of bfloat16 at most `x`, float32, less than two units in the last place below; 0 for 0.

    NaN where there is none. Below the least numbers of bfloat16 there is no other: there it is themselves.
    """
    pattern = (x - x.abs() * 2.0**-8).view(torch.int32)
    # Rounded in the bits of float32: compilers drop a cast to bfloat16 and back inside a kernel.
    below = ((pattern + 0x8000) & -0x10000).view(torch.float32)
    # A GPU's NaN is 0x7fffffff, and would come out as -0: all of its group as the minimum.
    return torch.where(x >= -_LARGEST, below.clamp_min(-_LARGEST), torch.nan)
