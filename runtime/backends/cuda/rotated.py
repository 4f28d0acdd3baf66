"""Rotated codes on the GPU: 32 numbers a lane in registers, a launch for each size of groups in a row.

The fewer than 64 numbers that a row may end with have a kernel of their own, a group a warp.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tensors.capture import to_last
from ...tensors.dtypes import KINDS, name_of
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.rotation import LEAST_PIECE, SIGNS, Piece, groups_of, pieces, positive_edges, positive_levels
from ..reference import rotated as reference
from .codegen.rotated import ELEMENTS_PER_BLOCK, GROUPS_PER_BLOCK, rotated_source
from .launching import Loaded, aligned, available, loaded, seed_arguments


def serves(x: Tensor) -> bool:
    """Return whether the kernels support `x` (N, D): CUDA memory."""
    if x.device.type != "cuda" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return available(x.get_device())


def quantize(x: Tensor, bits: int, group_size: int, turns: int, unbiased: bool, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    if not serves(x):
        return reference.quantize(x, bits, group_size, turns, unbiased, seed)
    N, D = x.shape
    packed = torch.empty(N, packed_size(D, bits), dtype=torch.uint8, device=x.device)
    scale = torch.empty(N, groups_of(D, group_size), dtype=torch.bfloat16, device=x.device)
    _quantize(x, packed, scale, bits, group_size, turns, unbiased, seed_arguments(seed))
    return packed, scale


def dequantize(packed: Tensor, scale: Tensor, bits: int, group_size: int, turns: int, seed: Seed, out: Tensor) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    if not serves(out):
        return reference.dequantize(packed, scale, bits, group_size, turns, seed, out)
    if out.dtype not in KINDS:
        single = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dequantize(packed, scale, bits, group_size, turns, seed, single)
        out.copy_(single)
        return
    _dequantize(aligned(packed), aligned(scale), bits, group_size, turns, seed_arguments(seed), out)


def quantize_buffers(
    xs: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    unbiased: Sequence[bool],
    group_size: int,
) -> list[Tensor]:
    """Return the buffers of the reference: kernels write scales and codes where they lie in them."""
    buffers = []
    for x, offset, b, mean_is_right in zip(xs, offsets, bits, unbiased, strict=True):
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
        if not serves(rows):
            buffers += reference.quantize_buffers([x], key, [offset], [b], [mean_is_right], group_size)
            continue
        size = reference.buffer_size(x.shape[-1], b, group_size)
        buffers.append(x.new_empty(*x.shape[:-1], size, dtype=torch.uint8))
        parts = _parts(buffers[-1], x.shape[-1], b, group_size)
        _quantize(rows, *parts, b, group_size, reference.TURNS, mean_is_right, _seed_after(key, offset, rows))
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    features: Sequence[int],
    group_size: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the tensors of the reference, from buffers where they lie."""
    xs = []
    for buffer, offset, b, D in zip(buffers, offsets, bits, features, strict=True):
        x = buffer.new_empty(*buffer.shape[:-1], D, dtype=dtype)
        rows = x.view(x.shape[:-1].numel(), D)
        if not serves(rows) or dtype not in KINDS:
            xs += reference.dequantize_buffers([buffer], key, [offset], [b], [D], group_size, dtype)
            continue
        parts = _parts(aligned(buffer), D, b, group_size)
        _dequantize(*parts, b, group_size, reference.TURNS, _seed_after(key, offset, rows), rows)
        xs.append(x)
    return xs


def _parts(buffer: Tensor, D: int, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales, views of an aligned buffer. Codes behind an odd number of scales are not aligned."""
    N = buffer.shape[:-1].numel()
    scale, packed = buffer.view(-1).split([2 * N * groups_of(D, group_size), N * packed_size(D, bits)])
    return packed.view(N, packed_size(D, bits)), scale.view(torch.bfloat16).view(N, groups_of(D, group_size))


def _seed_after(key: Tensor, offset: int, x: Tensor) -> tuple[int, int]:
    """Return the seed so many after a key, as kernels of `x` take it: those of a key beside it add for themselves."""
    if key.device == x.device:
        return offset, key.data_ptr()
    return seed_arguments(reference.seeds_of(key, [offset])[0])


def _quantize(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bits: int,
    group_size: int,
    turns: int,
    unbiased: bool,
    seed: tuple[int, int],
) -> None:
    """Write codes and scales of `x` (N, D): a launch for each size of groups in a row."""
    N, D = x.shape
    levels, edges = _tables(bits, x.device)
    memory = (x.data_ptr(), packed.data_ptr(), scale.data_ptr())
    how = (turns, int(unbiased), levels.data_ptr(), edges.data_ptr(), *seed)
    for piece in pieces(D, group_size):
        place = _place(piece, N, D, group_size)
        _launch("quantize", x, bits, piece.size, _blocks(piece, N), *memory, *place, *how)


def _dequantize(
    packed: Tensor, scale: Tensor, bits: int, group_size: int, turns: int, seed: tuple[int, int], out: Tensor
) -> None:
    N, D = out.shape
    levels, _ = _tables(bits, out.device)
    memory = (packed.data_ptr(), scale.data_ptr(), out.data_ptr())
    for piece in pieces(D, group_size):
        place = _place(piece, N, D, group_size)
        _launch(
            "dequantize", out, bits, piece.size, _blocks(piece, N), *memory, *place, turns, levels.data_ptr(), *seed
        )


def _place(piece: Piece, N: int, D: int, group_size: int) -> tuple[int, ...]:
    counters = max(1, group_size // SIGNS)
    return N, D, piece.start, piece.size, piece.count, piece.first, groups_of(D, group_size), counters


def _blocks(piece: Piece, N: int) -> int:
    if piece.size < LEAST_PIECE:
        return -(-N // GROUPS_PER_BLOCK)
    return -(-N * piece.count * piece.size // ELEMENTS_PER_BLOCK)


@cache
def _tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positive levels and edges on a device; the edges end with infinity."""
    edges = np.append(positive_edges(bits), np.float32(np.inf))
    levels = torch.from_numpy(positive_levels(bits).copy())
    return to_last(levels, device), to_last(torch.from_numpy(edges), device)


def _launch(name: str, x: Tensor, bits: int, size: int, blocks: int, *arguments: int) -> None:
    """Run the kernel of a size of groups on the device of `x`: one serves all that are shorter than 64."""
    if blocks:
        whole = size if size >= LEAST_PIECE else None
        _kernel(name, name_of(x.dtype), bits, whole, x.get_device()).launch(blocks, *arguments)


@cache
def _kernel(name: str, dtype: str, bits: int, size: int | None, device: int) -> Loaded:
    return loaded(rotated_source(dtype, bits, size), name, device)
