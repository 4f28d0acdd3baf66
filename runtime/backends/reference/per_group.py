"""Per-group quantization in plain torch: see quantizers/per_group.py for the mathematics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tensors.dtypes import largest
from ...tensors.packing import GROUP, packed_size
from ...tensors.philox import NEAREST, random_halves, rotated_halves
from ...tensors.rows import Rows

LEAST_RANGE = 2.0**-100  # 2^16·255 / R is then a finite float32
NOT_A_NUMBER = 0x7FC0
INFINITY = 0x7F80


def quantize(
    x: Tensor, bits: int | Tensor, group_size: int, seed: int, room: int = 0, rotated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, minima and ranges of `x` (N, D), as `PerGroupCompressed` saves them.

    The codes of samples with bits of their own take `room` bytes, which are not less than they need.

    With `rotated`, D is a multiple of the group size, and codes are rounded by `rotated_halves`.
    """
    N, D = x.shape
    rows = Rows(N, D, bits)
    G = max(1, min(group_size, D))
    groups = -(-D // G)
    top = _top(bits, x.device)  # B
    h = torch.cat([x, x[:, -1:].expand(N, groups * G - D)], dim=1).float().view(N, groups, G)
    minimum, range_, is_plain, constant_bit = group_parameters(h.amin(2), h.amax(2))
    Z, R = _float_of(minimum), _float_of(range_)
    scale = torch.where(is_plain, (top << 16).float() / R, 0)
    difference = torch.where(is_plain.unsqueeze(2), h - Z.unsqueeze(2), 0)
    v = (difference * scale.unsqueeze(2) + 0.5).int().view(N, groups * G)[:, :D]
    width = rows.width * GROUP
    if seed == NEAREST:
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
    b = torch.as_tensor(bits, dtype=torch.int32, device=device).view(-1, 1)
    return (1 << b) - 1


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
    packed: Tensor, minimum: Tensor, range_: Tensor, bits: int | Tensor, group_size: int, out: Tensor
) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    N, D = out.shape
    G = max(1, min(group_size, D))
    codes = Rows(N, D, bits).unpack(packed).int()
    z = (_bits_of(minimum)).repeat_interleave(G, dim=1)[:, :D]
    r = (_bits_of(range_)).repeat_interleave(G, dim=1)[:, :D]
    constant = z << 16 | codes << 15 | r & 0x7FFF
    R = _float_of(r)
    values = _float_of(z) + codes.float() * (R / _top(bits, out.device).float())
    limit = largest(out.dtype)  # levels outside the group may be outside the dtype's range
    out.copy_(torch.where(r >= 0x8000, constant.view(torch.float32), values.clamp(-limit, limit)))


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
) -> list[Tensor]:
    """Return minima, ranges and packed codes of each of `xs` (…, D), taken as one sample, in one buffer.

    Codes are rounded by `rotated_halves`, which take a fraction of the time of a random number for each. The shape of
    the buffer, uint8 (…, `buffer_size` of D), tells the sizes; its memory holds the minima of all groups, then their
    ranges, then all codes, so that each is aligned.
    """
    buffers = []
    for x, b, G, key in zip(xs, bits, group_sizes, keys_of(seeds, stochastic), strict=True):
        parts = quantize(x.reshape(1, x.numel()), b, G, key, rotated=True)
        packed, minimum, range_ = (part.view(torch.uint8).view(-1) for part in parts)
        shape = (*x.shape[:-1], buffer_size(x.shape[-1], b, G))
        buffers.append(torch.cat([minimum, range_, packed]).view(shape))
    return buffers


def dequantize_buffers(
    buffers: Sequence[Tensor], bits: Sequence[int], group_sizes: Sequence[int], dtype: torch.dtype
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
        dequantize(packed.view(1, -1), low, height, b, G, x.view(1, n))
        xs.append(x)
    return xs


def _float_of(half: Tensor) -> Tensor:
    """Return the bfloat16 numbers with the given 16 bits each, given as int32, in float32."""
    return (half << 16).view(torch.float32)


def _half_of(half: Tensor) -> Tensor:
    return half.to(torch.int16).view(torch.bfloat16)


def _bits_of(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.int16).int() & 0xFFFF
