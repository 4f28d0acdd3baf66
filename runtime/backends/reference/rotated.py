"""Rotated codes in plain torch: quantizers/rotated.py has the mathematics, tensors/rotation.py groups and signs.

The arithmetic, which every backend follows step by step: float32, no product merged with a sum. A sum over a group is
a tree: the halves of each 32 numbers are added, sixteen, eight, four, two and one at once, then blocks of 32 in pairs,
pairs of pairs and so on (numbers beyond the group are 0). The greatest magnitude of a group, 2^e to 2^{e+1}, is scaled
by 2^-e first, which is exact, so that no square leaves float32 whatever the numbers.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ...tensors.graphs import to_last
from ...tensors.packing import GROUP, pack, packed_size, unpack
from ...tensors.philox import MASK, Seed, philox
from ...tensors.rotation import (
    LARGEST_GROUP,
    SHARED,
    SIGNS,
    Piece,
    groups_of,
    pieces,
    positive_edges,
    positive_levels,
)
from ...tensors.traits import largest

NOT_A_NUMBER, LARGEST_HALF = 0x7FC0, 0x7F7F  # in the bits of bfloat16, in which scales are saved
INFINITY = 0x7F800000  # in those of float32
_BLOCK = 32  # numbers that are added in halves of halves: the lanes of a warp of a GPU
_LARGEST_SEED = 2**63 - 1  # int64, and not negative
# Of the groups in buffers. After one turn an entry of 100 makes the others come back 3.4 times as large at 2 bits.
TURNS = 2


def quantize(x: Tensor, bits: int, group_size: int, turns: int, unbiased: bool, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    N, D = x.shape
    codes = torch.zeros(N, -(-D // GROUP) * GROUP, dtype=torch.uint8, device=x.device)
    scale = torch.zeros(N, groups_of(D, group_size), dtype=torch.int32, device=x.device)
    for piece in pieces(D, group_size):
        end = piece.start + piece.count * piece.size
        h = x[:, piece.start : end].float().view(N, piece.count, piece.size)
        k, s = _quantize_groups(h, bits, turns, unbiased, _signs(piece, N, scale.shape[1], group_size, turns, seed, x))
        codes[:, piece.start : end] = k.flatten(1)
        scale[:, piece.first : piece.first + piece.count] = s
    return pack(codes, bits).view(N, codes.shape[1] // GROUP * bits), scale.to(torch.int16).view(torch.bfloat16)


def dequantize(packed: Tensor, scale: Tensor, bits: int, group_size: int, turns: int, seed: Seed, out: Tensor) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    N, D = out.shape
    width = -(-D // GROUP) * GROUP
    codes = unpack(packed.reshape(-1), bits, N * width).view(N, width)[:, :D].int()
    positive, _ = _positive(bits, out.device)
    levels = torch.cat([-positive.flip(0), positive])
    limit = largest(out.dtype)
    for piece in pieces(D, group_size):
        end = piece.start + piece.count * piece.size
        v = levels[codes[:, piece.start : end]].view(N, piece.count, piece.size)
        own, shared = _signs(piece, N, scale.shape[1], group_size, turns, seed, out)
        for m, place in reversed(list(enumerate(piece.places * turns))):
            v = _butterflies(v, place, piece)
            if m:
                v = _flipped(v, shared[m - 1], place)
        s = scale[:, piece.first : piece.first + piece.count].float().unsqueeze(2)
        values = torch.where(s == 0, 0.0, v * own * s)
        out[:, piece.start : end] = values.clamp(-limit, limit).flatten(1)


def seeds_of(key: Tensor, offsets: Sequence[int]) -> list[Seed]:
    """Return the seeds that come so many after a key, int64 (1,): numbers, or from a GPU each () there."""
    if key.device.type == "cuda":
        return [(key[0] + offset) & _LARGEST_SEED for offset in offsets]
    first = int(key)
    return [first + offset & _LARGEST_SEED for offset in offsets]


def buffer_size(D: int, bits: int, group_size: int) -> int:
    """Return the bytes of a row of D elements in a buffer: its codes and scales."""
    return packed_size(D, bits) + 2 * groups_of(D, group_size)


def quantize_buffers(
    xs: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    unbiased: Sequence[bool],
    group_size: int,
    quantize: Callable[..., tuple[Tensor, Tensor]] = quantize,
) -> list[Tensor]:
    """Return scales and packed codes of each of `xs` (…, D), rows of D elements, in one buffer.

    The shape of a buffer, uint8 (…, `buffer_size` of D), tells the rows; its memory holds all scales, then all codes.
    """
    buffers = []
    for x, seed, b, mean_is_right in zip(xs, seeds_of(key, offsets), bits, unbiased, strict=True):
        D = x.shape[-1]
        packed, scale = quantize(x.reshape(x.shape[:-1].numel(), D), b, group_size, TURNS, mean_is_right, seed)
        whole = torch.cat([scale.view(torch.uint8).view(-1), packed.view(-1)])
        buffers.append(whole.view(*x.shape[:-1], buffer_size(D, b, group_size)))
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    features: Sequence[int],
    group_size: int,
    dtype: torch.dtype,
    dequantize: Callable[..., None] = dequantize,
) -> list[Tensor]:
    """Return the tensors (…, D), D the number of `features`, that `quantize_buffers` gave the buffers of."""
    xs = []
    for buffer, seed, b, D in zip(buffers, seeds_of(key, offsets), bits, features, strict=True):
        x = torch.empty(*buffer.shape[:-1], D, dtype=dtype, device=buffer.device)
        N = x.shape[:-1].numel()
        scale, packed = buffer.reshape(-1).split([2 * N * groups_of(D, group_size), N * packed_size(D, b)])
        scale = scale.clone().view(torch.bfloat16).view(N, groups_of(D, group_size))  # aligned
        dequantize(packed.view(N, packed_size(D, b)), scale, b, group_size, TURNS, seed, x.view(N, D))
        xs.append(x)
    return xs


def _quantize_groups(
    h: Tensor, bits: int, turns: int, unbiased: bool, signs: tuple[Tensor, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the codes of groups (N, count, g), uint8, and the 16 bits of their scales, int32 (N, count)."""
    own, shared = signs
    g = h.shape[2]
    piece = Piece(0, g, 1, 0)
    whole = len(piece.places) == 1
    greatest = (h.view(torch.int32) & 0x7FFFFFFF).amax(2)
    finite = greatest < INFINITY
    exponent = (greatest >> 23).clamp(2, 253)  # biased, such that both 2^e and 2^-e are normal numbers
    down, up = ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)
    r = torch.where(finite.unsqueeze(2), h, 0) * down.unsqueeze(2)
    energy = tree_sum(r * r)
    r = r * own
    for m, place in enumerate(piece.places * turns):
        if m:
            r = _flipped(r, shared[m - 1], place)
        r = _butterflies(r, place, piece)
    # Passes over a whole group leave out 1/√g: r is g^{turns/2} times as long as h, and σ likewise.
    unit = h.new_full((), float(g ** (turns - 1)) if whole else 1 / g)
    σ = (energy * unit).sqrt()
    magnitude = r.abs()
    levels, edges = _positive(bits, h.device)
    above = torch.zeros_like(r, dtype=torch.int32)
    for edge in edges:
        above += magnitude > (σ * edge).unsqueeze(2)
    level = levels[above]
    along = tree_sum(magnitude * level)
    least = along / tree_sum(level * level) * (float(g) ** -turns if whole else 1.0)
    s = energy / along if unbiased else least
    pattern = (s * up).view(torch.int32)
    scale = ((pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16).clamp(max=LARGEST_HALF)
    scale = torch.where(greatest == 0, 0, torch.where(finite, scale, NOT_A_NUMBER))
    half = 1 << (bits - 1)
    codes = torch.where(r > 0, half + above, half - 1 - above)
    used = (scale != 0) & finite
    return torch.where(used.unsqueeze(2), codes, 0).to(torch.uint8), scale


@cache
def _positive(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positive levels and edges on a device."""
    parts = (positive_levels(bits), positive_edges(bits))
    levels, edges = (to_last(torch.from_numpy(part.copy()), device) for part in parts)
    return levels, edges


def tree_sum(terms: Tensor) -> Tensor:
    """Return the sums of the last dimension, at most 256 numbers not below 0, in the order of all backends."""
    t = torch.nn.functional.pad(terms, (0, LARGEST_GROUP - terms.shape[-1])).unflatten(-1, (-1, _BLOCK))
    while t.shape[-1] > 1:
        t = t[..., : t.shape[-1] // 2] + t[..., t.shape[-1] // 2 :]
    t = t.squeeze(-1)
    while t.shape[-1] > 1:
        t = t[..., 0::2] + t[..., 1::2]
    return t.squeeze(-1)


def _butterflies(r: Tensor, place: tuple[int, int], piece: Piece) -> Tensor:
    """Return `r` with sums and differences of the elements at `place`, of neighbours first."""
    begin, end = place
    part = r[..., begin:end]
    step = 1
    while step < end - begin:
        a, b = part.unflatten(-1, (-1, 2, step)).unbind(-2)
        part = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    if len(piece.places) == 1:
        return part
    part = part * part.new_full((), (end - begin) ** -0.5)
    return torch.cat([r[..., :begin], part, r[..., end:]], -1)


def _flipped(r: Tensor, sign: Tensor, place: tuple[int, int]) -> Tensor:
    begin, end = place
    return torch.cat([r[..., :begin], r[..., begin:end] * sign, r[..., end:]], -1)


def _signs(
    piece: Piece, N: int, groups: int, group_size: int, turns: int, seed: Seed, like: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return ±1 of the first pass, (N, count, g), and of each further one, (p,)."""
    device = like.device
    width = max(1, group_size // SIGNS)
    k = torch.arange(N, device=device).unsqueeze(1) * groups + piece.first + torch.arange(piece.count, device=device)
    counters = (k * width).unsqueeze(2) + torch.arange(width, device=device)
    own = _bits(counters, seed)[..., : piece.size]
    shared = []
    for m, (begin, end) in list(enumerate(piece.places * turns))[1:]:
        counters = SHARED + 2 * m + torch.arange(width, device=device)
        shared.append(1.0 - 2.0 * _bits(counters, seed)[: end - begin])
    return 1.0 - 2.0 * own, shared


def _bits(counters: Tensor, seed: Seed) -> Tensor:
    """Return the random bits of counters (…, n): float32 (…, 128·n), 0 or 1."""
    zero = torch.zeros_like(counters)
    words = torch.stack(philox((counters & MASK, counters >> 32, zero, zero), (seed & MASK, seed >> 32)), -1)
    # Integers would become numbers of torch's default dtype, and those of float64 all that they multiply.
    return (words.unsqueeze(-1) >> torch.arange(32, device=counters.device) & 1).flatten(-3).to(torch.float32)
