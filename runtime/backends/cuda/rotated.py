"""Rotated codes on the GPU: 64 or 128 numbers a lane in registers, a launch for each size of groups in a row.

The fewer than 64 numbers that a row may end with have a kernel of their own, a group a warp.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from ...tensors.graphs import to_last
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.rotation import LEAST_PIECE, SIGNS, groups_of, pieces, positive_edges, positive_levels
from ...tensors.traits import KINDS, name_of
from ..reference import rotated as reference
from .codegen.rotated import GROUPS_PER_BLOCK, HELD, rotated_source
from .codegen.source import THREADS
from .launching import Loaded, aligned, loaded, seed_arguments, serves


def quantize(x: Tensor, bits: int, group_size: int, turns: int, unbiased: bool, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    if not serves(x):
        return reference.quantize(x, bits, group_size, turns, unbiased, seed)
    N, D = x.shape
    packed = torch.empty(N, packed_size(D, bits), dtype=torch.uint8, device=x.device)
    scale = torch.empty(N, groups_of(D, group_size), dtype=torch.bfloat16, device=x.device)
    place = (x.data_ptr(), packed.data_ptr(), scale.data_ptr())
    _quantize(x, place, (N, D, group_size), bits, turns, unbiased, seed_arguments(seed))
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
    packed, scale = aligned(packed), aligned(scale)
    place = (packed.data_ptr(), scale.data_ptr(), out.data_ptr())
    _dequantize(out, place, (out.shape[0], out.shape[1], group_size), bits, turns, seed_arguments(seed))


def quantize_buffers(
    xs: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    unbiased: Sequence[bool],
    group_size: int,
) -> list[Tensor]:
    """Return the buffers of the reference: kernels write scales and codes where they lie in them.

    Without views: a compiled step of 16 blocks calls this for 128 tensors, and Python is then what a GPU waits for.
    """
    buffers = []
    for x, offset, b, mean_is_right in zip(xs, offsets, bits, unbiased, strict=True):
        if not serves(x):
            buffers += reference.quantize_buffers([x], key, [offset], [b], [mean_is_right], group_size)
            continue
        x, D = x.contiguous(), x.shape[-1]
        N = x.numel() // D
        size = reference.buffer_size(D, b, group_size)
        buffers.append(torch.empty((*x.shape[:-1], size), dtype=torch.uint8, device=x.device))
        scale = buffers[-1].data_ptr()
        place = (x.data_ptr(), scale + 2 * N * groups_of(D, group_size), scale)
        _quantize(x, place, (N, D, group_size), b, reference.TURNS, mean_is_right, _seed_after(key, offset, x))
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
        if not serves(buffer) or dtype not in KINDS:
            xs += reference.dequantize_buffers([buffer], key, [offset], [b], [D], group_size, dtype)
            continue
        N = buffer.shape[:-1].numel()  # of rows, which may have no elements
        x, buffer = torch.empty((*buffer.shape[:-1], D), dtype=dtype, device=buffer.device), aligned(buffer)
        scale = buffer.data_ptr()
        place = (scale + 2 * N * groups_of(D, group_size), scale, x.data_ptr())
        _dequantize(x, place, (N, D, group_size), b, reference.TURNS, _seed_after(key, offset, x))
        xs.append(x)
    return xs


def _seed_after(key: Tensor, offset: int, x: Tensor) -> tuple[int, int]:
    """Return the seed so many after a key, as kernels of `x` take it: those of a key beside it add for themselves."""
    if key.device == x.device:
        return offset, key.data_ptr()
    return seed_arguments(reference.seeds_of(key, [offset])[0])


def _quantize(
    x: Tensor,
    place: tuple[int, int, int],
    rows: tuple[int, int, int],
    bits: int,
    turns: int,
    unbiased: bool,
    seed: tuple[int, int],
) -> None:
    """Write codes and scales of `x`: a launch for each size of groups in a row.

    Args:
        x: contiguous.
        place: addresses of numbers, codes and scales.
        rows: their number, the elements of each, and of a group at most.
        bits, turns, unbiased: as for `quantize`.
        seed: as kernels take it.
    """
    levels, edges = _tables(bits, x.device)
    how = (turns, int(unbiased), levels.data_ptr(), edges.data_ptr(), *seed)
    for size, blocks, piece in _launches(*rows):
        _launch("quantize", x, bits, size, blocks, *place, *piece, *how)


def _dequantize(
    out: Tensor,
    place: tuple[int, int, int],
    rows: tuple[int, int, int],
    bits: int,
    turns: int,
    seed: tuple[int, int],
) -> None:
    """Write numbers to `out`, of codes and scales whose addresses and its own are `place`; else as `_quantize`."""
    levels, _ = _tables(bits, out.device)
    for size, blocks, piece in _launches(*rows):
        _launch("dequantize", out, bits, size, blocks, *place, *piece, turns, levels.data_ptr(), *seed)


@lru_cache(4096)
def _launches(N: int, D: int, group_size: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return for each size of groups in rows of D elements: the size, blocks, and what kernels know of `Piece`."""
    of_row, counters = groups_of(D, group_size), max(1, group_size // SIGNS)
    found = []
    for piece in pieces(D, group_size):
        blocks = -(-N // GROUPS_PER_BLOCK)  # of the short group at the end: a warp each
        if piece.size >= LEAST_PIECE:
            blocks = -(-N * piece.count * piece.size // (HELD[piece.size] * THREADS))
        place = (N, D, piece.start, piece.size, piece.count, piece.first, of_row, counters)
        found.append((piece.size, blocks, place))
    return found


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
