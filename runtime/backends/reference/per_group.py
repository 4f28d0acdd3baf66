"""Per-group quantization in plain torch: see quantizers/per_group.py and tensors/levels.py for the mathematics."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ...tensors.graphs import to_last
from ...tensors.levels import (
    ABOVE,
    BELOW,
    CHOOSES,
    EXPONENTS,
    FIRST_EXPONENT,
    LEAST_RANGE,
    LOWERED,
    NOTHING,
    OTHERWISE_LEAST,
    SAMPLE,
    UNIFORM,
    prepare_levels,
)
from ...tensors.packing import GROUP, Rows, packed_size
from ...tensors.philox import NEAREST, Seed, random_halves, rotated_halves
from ...tensors.traits import largest

NOT_A_NUMBER, INFINITY = 0x7FC0, 0x7F80  # in the bits of bfloat16


def quantize(
    x: Tensor,
    bits: int | Tensor,
    group_size: int,
    seed: Seed,
    room: int = 0,
    levels: str = UNIFORM,
    rotated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, minima and ranges of `x` (N, D), as `PerGroupCompressed` saves them.

    The codes of samples with bits of their own take `room` bytes, which are not less than they need. `levels` is a name
    or a key (tensors/levels.py).

    With `rotated`, D is a multiple of the group size, and codes are rounded by `rotated_halves`.
    """
    N, D = x.shape
    rows = Rows(N, D, bits)
    G = max(1, min(group_size, D))
    groups = -(-D // G)
    top = _top(bits, x.device)  # B
    x = x.float()  # first: autocast refuses to join 16-bit numbers of another type than its own
    h = torch.cat([x, x[:, -1:].expand(N, groups * G - D)], dim=1).view(N, groups, G)
    minimum, range_, is_plain, constant_bit = group_parameters(h.amin(2), h.amax(2))
    Z, R = _float_of(minimum), _float_of(range_)
    scale = torch.where(is_plain, (top << 16).float() / R, 0)
    difference = torch.where(is_plain.unsqueeze(2), h - Z.unsqueeze(2), 0)
    prepared = prepare_levels(levels, x.device)
    shape = torch.full_like(range_, prepared.shape)
    if prepared.shape == CHOOSES:
        counted = (torch.arange(groups * G, device=x.device) < D).view(groups, G)[:, :SAMPLE]
        shape = torch.where(is_plain, _chosen_shape(h[..., :SAMPLE], counted, Z, R, range_), 0)
        range_ = range_ - _lowered(x.device)[shape]
    lines = prepared.lines[_each(bits, x.device), shape, 0].unsqueeze(2)
    v = (_on_curve(difference * scale.unsqueeze(2), lines) + 0.5).int().view(N, groups * G)[:, :D]
    width = rows.width * GROUP
    if isinstance(seed, int) and seed == NEAREST:
        ξ: int | Tensor = 1 << 15
    elif rotated:
        ξ = rotated_halves(seed, N * groups, G, x.device).view(N, D)
    else:
        ξ = random_halves(seed, N * rows.width, x.device).view(N, width)[:, :D]
    codes = torch.minimum((v + ξ) >> 16, top)
    plain = is_plain.repeat_interleave(G, dim=1)[:, :D]
    codes = torch.where(plain, codes, constant_bit.repeat_interleave(G, dim=1)[:, :D])
    return rows.pack(codes.to(torch.uint8), room), _half_of(minimum), _half_of(range_)


def _top(bits: int | Tensor, device: torch.device) -> Tensor:
    """Return B = 2^b − 1 as int32: (1, 1), or (N, 1) for the bits of N samples.

    A tensor even for a single number: `number / tensor` and `tensor / number` may round twice on some devices.
    """
    return (1 << _each(bits, device)) - 1


def _each(bits: int | Tensor, device: torch.device) -> Tensor:
    """Return b as int32: (1, 1), or (N, 1) for the bits of N samples."""
    return torch.as_tensor(bits, dtype=torch.int32, device=device).view(-1, 1)


def _chosen_shape(h: Tensor, counted: Tensor, Z: Tensor, R: Tensor, range_: Tensor) -> Tensor:
    """Return the shape of the levels that fit each group, int64 (N, groups).

    Of `low`, `middle` and `high` values in the lowest quarter of the range, the middle half and the highest quarter:
    normal (1) if the middle is above 3 times the others; skewed (2) if the lowest quarter is above half of the middle
    and 2 times the highest. Values within 1/64 of the minimum count for nothing: any levels represent them well.

    Args:
        h: the first values of each group, (N, groups, n).
        counted: (groups, n), which of them are there.
        Z, R: minima and ranges.
        range_: the 16 bits of the ranges.
    """
    beyond = [((h >= (Z + R * part).unsqueeze(2)) & counted).sum(2) for part in (NOTHING, BELOW, ABOVE)]
    low, middle, high = beyond[0] - beyond[1], beyond[1] - beyond[2], beyond[2]
    shape = torch.where(middle > 3 * (low + high), 1, torch.where(2 * low > middle + 4 * high, 2, 0))
    exponent = range_ >> 7
    tells = (exponent >= FIRST_EXPONENT) & (exponent < FIRST_EXPONENT + EXPONENTS)
    return torch.where(tells, shape, 0)


def _on_curve(d: Tensor, lines: Tensor) -> Tensor:
    """Return c_0 d + Σ_j c_j max(d − K_j, 0), with `lines` (…, W) as `Levels` holds them."""
    y = lines[..., 1] * d
    for j in range(2, lines.shape[-1], 2):
        y = y + lines[..., j] * (d - lines[..., j + 1]).clamp(min=0)
    return y


def group_parameters(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the saved parameters of groups from `low` to `high`, float32.

    Returns:
        minimum, range: the 16 bits of each, int32.
        is_plain: whether the group is neither constant nor infinite.
        constant_bit: the code of all elements in a group that is not plain, int32.
    """
    low = low + 0.0  # −0 becomes 0
    pattern = low.view(torch.int32)
    minimum = (pattern >> 16) + ((pattern < 0) & (pattern & 0xFFFF != 0)) & 0xFFFF  # away from 0 if negative
    Z = _float_of(minimum)
    difference = high - Z
    # The error of the subtraction (Knuth's two-sum); if it is positive, the range is the next number up.
    back = difference - high
    lost = (high - (difference - back)) + (-Z - back)
    bits = difference.clamp(min=LEAST_RANGE).view(torch.int32) + (lost > 0)
    range_ = (bits + 0xFFFF) >> 16
    finite = low.isfinite() & high.isfinite()
    constant = finite & (low == high)
    plain = finite & ~constant & (minimum & INFINITY != INFINITY) & (range_ < INFINITY)
    minimum = torch.where(constant, pattern >> 16 & 0xFFFF, torch.where(plain, minimum, NOT_A_NUMBER))
    range_ = torch.where(constant, pattern & 0x7FFF | 0x8000, torch.where(plain, range_, 0))
    return minimum, range_, plain, torch.where(constant, pattern >> 15 & 1, 0)


def dequantize(
    packed: Tensor,
    minimum: Tensor,
    range_: Tensor,
    bits: int | Tensor,
    group_size: int,
    out: Tensor,
    levels: str = UNIFORM,
) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    N, D = out.shape
    G = max(1, min(group_size, D))
    codes = Rows(N, D, bits).unpack(packed).int()
    z = (_bits_of(minimum)).repeat_interleave(G, dim=1)[:, :D]
    r = (_bits_of(range_)).repeat_interleave(G, dim=1)[:, :D]
    constant = z << 16 | codes << 15 | r & 0x7FFF
    prepared = prepare_levels(levels, out.device)
    if prepared.shape == CHOOSES:  # and the range's exponent tells which
        shape = torch.where((r == 0) | (r >= OTHERWISE_LEAST), 0, torch.where(r >> 7 <= EXPONENTS, 1, 2))
        r_chosen = r + _lowered(out.device)[shape]
    else:
        shape, r_chosen = torch.full_like(r, prepared.shape), r
    R = _float_of(r_chosen)
    level = _on_curve(codes.float(), prepared.lines[_each(bits, out.device), shape, 1])
    values = _float_of(z) + level * (R / _top(bits, out.device).float())
    limit = largest(out.dtype)  # levels outside the group may be outside the dtype's range
    out.copy_(torch.where(r >= 0x8000, constant.view(torch.float32), values.clamp(-limit, limit)))


@cache
def _lowered(device: torch.device) -> Tensor:
    return to_last(torch.tensor(LOWERED, dtype=torch.int32, device="cpu"), device)


def buffer_size(elements: int, bits: int, group_size: int) -> int:
    """Return the bytes that D elements take, a multiple of 8 and of the group size: parameters and codes."""
    return elements // group_size * 4 + packed_size(elements, bits)


def elements_of(size: int, bits: int, group_size: int) -> int:
    """Return the elements D of which `size` is the `buffer_size`."""
    return size * 8 * group_size // (32 + bits * group_size)


def keys_of(seeds: Tensor | None, stochastic: Sequence[bool]) -> list[int]:
    """Return the key that each tensor is rounded by: its seed, or `NEAREST` if it is not rounded at random."""
    if seeds is None:
        return [NEAREST] * len(stochastic)
    return [key if at_random else NEAREST for key, at_random in zip(seeds.tolist(), stochastic, strict=True)]


def quantize_buffers(
    xs: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    seeds: Tensor | None,
    stochastic: Sequence[bool],
    levels: str = UNIFORM,
) -> list[Tensor]:
    """Return minima, ranges and packed codes of each of `xs` (…, D), taken as one sample, in one buffer.

    Codes are rounded by `rotated_halves`, which take a fraction of the time of a random number for each. The shape of
    the buffer, uint8 (…, `buffer_size` of D), tells the sizes; its memory holds the minima of all groups, then their
    ranges, then all codes, so that each is aligned.
    """
    buffers = []
    for x, b, G, key in zip(xs, bits, group_sizes, keys_of(seeds, stochastic), strict=True):
        parts = quantize(x.reshape(1, x.numel()), b, G, key, 0, levels, rotated=True)
        packed, minimum, range_ = (part.view(torch.uint8).view(-1) for part in parts)
        shape = (*x.shape[:-1], buffer_size(x.shape[-1], b, G))
        buffers.append(torch.cat([minimum, range_, packed]).view(shape))
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    dtype: torch.dtype,
    levels: str = UNIFORM,
) -> list[Tensor]:
    """Return the tensors that `quantize_buffers` gave the buffers of."""
    xs = []
    for buffer, b, G in zip(buffers, bits, group_sizes, strict=True):
        shape = (*buffer.shape[:-1], elements_of(buffer.shape[-1], b, G))
        x = torch.empty(shape, dtype=dtype, device=buffer.device)
        n = x.numel()
        size = n // G * 2
        minimum, range_, packed = buffer.reshape(-1).split([size, size, packed_size(n, b)])
        low, height = (part.clone().view(torch.bfloat16).view(1, -1) for part in (minimum, range_))  # aligned
        dequantize(packed.view(1, -1), low, height, b, G, x.view(1, n), levels)
        xs.append(x)
    return xs


def _float_of(half: Tensor) -> Tensor:
    """Return the bfloat16 numbers with the given 16 bits each, given as int32, in float32."""
    return (half << 16).view(torch.float32)


def _half_of(half: Tensor) -> Tensor:
    return half.to(torch.int16).view(torch.bfloat16)


def _bits_of(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.int16).int() & 0xFFFF
