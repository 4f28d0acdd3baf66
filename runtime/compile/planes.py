"""Codes of b bits as planes of 8, 4, 2 and 1 bits, and a plane as bytes, for two kinds of compilers.

    planes = pack(codes, bits=6, blocks=True)        words of (…, size/8), of 4 and of 2 bytes
    codes = unpack(planes, bits=6, blocks=True)      (…, size in any number of dimensions)

Which codes of a group share bytes differs:

    halves    (C++) a plane is folded in floating point: of 4-bit codes the first half of a group lies in the low bits
              of its bytes, the second half in the high. So the loops stay vectorized: no integer shift, and neighbours
              stay neighbours.
    blocks    (Triton) 8 neighbours are a word, of 8·w bits for a plane of w, cut by shifts and masks. A thread of a GPU
              holds 8 neighbours: it packs them without asking another, and 8 loads of one word become one. How
              `pack_block` gets into the kernel that computes the codes is in triton_store.py.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..ops.declare import Call, declare

BLOCK = 8  # codes of b bits are b whole bytes
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of a block, by the width of a plane


def planes_of(bits: int) -> list[int]:
    """Return the widths of the planes that codes of `bits` bits are cut into, from the lowest: powers of two."""
    return [w for w in (8, 4, 2, 1) if bits & w]


def pack(codes: Tensor, bits: int, blocks: bool) -> list[Tensor]:
    """Return the planes of codes, size·width/8 bytes each: uint8 of halves and of 8 bits, else words of blocks.

    Args:
        codes: int32 (…, size), below 2^bits.
        bits: b, 1 to 8.
        blocks: whether 8 neighbours share bytes, or the halves of a group.
    """
    if bits == 8:
        return [codes.to(torch.uint8)]
    if not blocks:
        # In memory a byte each, where several planes or the halves of one read them: compilers would write float32.
        return _to_planes(written(codes.to(torch.uint8)).float(), bits)
    packed, shift = [], 0
    for width in planes_of(bits):
        packed.append(pack_block(codes if width == bits else codes >> shift & 2**width - 1, width))
        shift += width
    return packed


def unpack(planes: Sequence[Tensor], bits: int, blocks: bool) -> Tensor:
    """Return the codes that `pack` packed, float32 (…, ·) of as many dimensions as suit the compiler."""
    if bits == 8:
        return planes[0].float()
    if not blocks:
        return _from_planes(planes, bits)
    codes, shift = None, 0
    for plane, width in zip(planes, planes_of(bits), strict=True):
        part = unpack_block(plane, width) << shift
        codes = part if codes is None else codes | part
        shift += width
    assert codes is not None
    return codes.float()


def written(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return the contiguous `x`, in another shape if one is given, by way of memory.

    Compilers fuse through a view, and then walk both shapes in one loop that divides indices; they do not fuse through
    `as_strided`. That reads memory, which Inductor lays out as it likes, such as channels last behind a convolution.
    """
    shape = x.shape if shape is None else shape
    _install()
    return in_memory(x).as_strided(tuple(shape), contiguous_strides(shape))


@declare("in_memory(Tensor x) -> Tensor")
def in_memory(x: Tensor) -> Call:
    """Return the numbers of `x`, contiguous in memory; where Inductor makes them itself, they lie so at once."""
    return Call(fake=lambda: x.new_empty(x.shape), run=lambda _: x.clone(memory_format=torch.contiguous_format))


@cache
def _install() -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    register_lowering(in_memory, type_promotion_kind=None)(ir.ExternKernel.require_contiguous)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of contiguous tensors of a shape: not those of one, which Inductor may lay out otherwise."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@declare("pack_block(Tensor codes, int width) -> Tensor")
def pack_block(codes: Tensor, width: int) -> Call:
    """Return int32 codes of `width` bits, 1, 2 or 4, (…, size) as a word for each 8, (…, size/8) of `WORDS[width]`."""
    shape, dtype = (*codes.shape[:-1], codes.shape[-1] // BLOCK), WORDS[width]
    return Call(
        fake=lambda: codes.new_empty(shape, dtype=dtype),
        run=lambda _: (codes.view(*shape, BLOCK) << _shifts(width, codes.device)).sum(-1).to(dtype),
    )


def unpack_block(words: Tensor, width: int) -> Tensor:
    """Return the int32 codes (…, size/8, 8) that `pack_block` packed."""
    return words.to(torch.int32).unsqueeze(-1) >> _shifts(width, words.device) & 2**width - 1


def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device) * width


# ---- halves ----------------------------------------------------------------------------------------------------------


def _to_planes(codes: Tensor, bits: int) -> list[Tensor]:
    planes = []
    for width in planes_of(bits):
        if width == bits:  # the last: nothing is left above it
            planes.append(fold(codes, width))
            break
        rest = (codes * 2.0**-width).floor()
        planes.append(fold(codes - rest * 2.0**width, width))
        codes, bits = rest, bits - width
    return planes


def fold(plane: Tensor, width: int) -> Tensor:
    """Return numbers of `width` bits (…, size) in bytes (…, size·width/8)."""
    while width < 8:
        half = plane.shape[-1] // 2
        plane = plane[..., :half] + plane[..., half:] * 2.0**width
        width *= 2
    return plane.to(torch.uint8)


def _from_planes(planes: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes as float32, (…, count, 2, …, 2, ·): a dimension of 2 for each fold of the narrowest plane."""
    widths = planes_of(bits)
    folds = _folds(widths[-1])
    codes = None
    for i, (plane, width) in enumerate(zip(planes, widths, strict=True)):
        part = _unfold(plane.float(), width)
        size = plane.shape[-1] * 8 // width
        part = part.reshape(*part.shape[: plane.dim() - 1], *[2] * folds, size >> folds)
        weight = 2.0 ** sum(widths[:i])
        codes = part if codes is None else codes + part * weight
    assert codes is not None
    return codes


def _folds(width: int) -> int:
    return {8: 0, 4: 1, 2: 2, 1: 3}[width]


def _unfold(numbers: Tensor, width: int) -> Tensor:
    """Return the numbers of `width` bits that `_fold` put into bytes: (…, 2, …, 2, ·), a dimension of 2 a fold.

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
