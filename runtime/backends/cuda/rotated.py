"""Rotated codes on the GPU: 32 numbers a lane in registers, a launch for each size of groups in a row."""

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from ...tensors.capture import to_last
from ...tensors.dtypes import KINDS, name_of
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.rotation import LEAST_PIECE, SIGNS, Piece, groups_of, pieces, positive_edges, positive_levels
from ..reference import rotated as reference
from .codegen.rotated import ELEMENTS_PER_BLOCK, rotated_source
from .launching import Loaded, aligned, available, loaded, seed_arguments


def serves(x: Tensor) -> bool:
    """Return whether the kernels support `x` (N, D): CUDA memory, and rows of whole groups of 64 and more."""
    if x.device.type != "cuda" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return x.shape[1] % LEAST_PIECE == 0 and available(x.get_device())


def quantize(x: Tensor, bits: int, group_size: int, turns: int, unbiased: bool, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    if not serves(x):
        return reference.quantize(x, bits, group_size, turns, unbiased, seed)
    N, D = x.shape
    packed = torch.empty(N, packed_size(D, bits), dtype=torch.uint8, device=x.device)
    scale = torch.empty(N, groups_of(D, group_size), dtype=torch.bfloat16, device=x.device)
    levels, edges = _tables(bits, x.device)
    memory = (x.data_ptr(), packed.data_ptr(), scale.data_ptr())
    for piece in pieces(D, group_size):
        place = _place(piece, N, D, group_size)
        how = (turns, int(unbiased), levels.data_ptr(), edges.data_ptr(), *seed_arguments(seed))
        _launch("quantize", x, bits, piece.size, _blocks(piece, N), *memory, *place, *how)
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
    N, D = out.shape
    packed, scale, (levels, _) = aligned(packed), aligned(scale), _tables(bits, out.device)
    memory = (packed.data_ptr(), scale.data_ptr(), out.data_ptr())
    for piece in pieces(D, group_size):
        place = _place(piece, N, D, group_size)
        how = (turns, levels.data_ptr(), *seed_arguments(seed))
        _launch("dequantize", out, bits, piece.size, _blocks(piece, N), *memory, *place, *how)


quantize_buffers = partial(reference.quantize_buffers, quantize=quantize)
dequantize_buffers = partial(reference.dequantize_buffers, dequantize=dequantize)


def _place(piece: Piece, N: int, D: int, group_size: int) -> tuple[int, ...]:
    counters = max(1, group_size // SIGNS)
    return N, D, piece.start, piece.count, piece.first, groups_of(D, group_size), counters


def _blocks(piece: Piece, N: int) -> int:
    return -(-N * piece.count * piece.size // ELEMENTS_PER_BLOCK)


@cache
def _tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positive levels and edges on a device; the edges end with infinity."""
    edges = np.append(positive_edges(bits), np.float32(np.inf))
    levels = torch.from_numpy(positive_levels(bits).copy())
    return to_last(levels, device), to_last(torch.from_numpy(edges), device)


def _launch(name: str, x: Tensor, bits: int, size: int, blocks: int, *arguments: int) -> None:
    """Run a kernel on the device of `x`."""
    if blocks:
        _kernel(name, name_of(x.dtype), bits, size, x.get_device()).launch(blocks, *arguments)


@cache
def _kernel(name: str, dtype: str, bits: int, size: int, device: int) -> Loaded:
    return loaded(rotated_source(dtype, bits, size), name, device)
