"""Codes of groups between their minimum and range (ActNN); quantizers/per_group.py says what the parts are.

    per_group_quantize(x, bits, group_size, seed) -> packed, minimum, range           x (N, D). Without a seed codes are
                                                                                      rounded to nearest. All six take
                                                                                      `levels` last, a name or the key
                                                                                      of a table (tensors/levels.py)
    per_group_dequantize(packed, minimum, range, bits, group_size, features, dtype) -> x
    per_group_quantize_samples, per_group_dequantize_samples     the same; bits uint8 (N,), and after the seed the room
                                                                 for the codes in bytes, int64 (1,) on the CPU
    per_group_quantize_buffers(xs, bits, group_sizes, seeds, stochastic) -> buffers     tensors (…, D), each taken as
    per_group_dequantize_buffers(buffers, bits, group_sizes, dtype) -> xs    one sample, whose minima, ranges and codes
                                                                             are one tensor; seeds (N,), of one random
                                                                             number a group, or codes are to nearest

The sizes of the codes of samples with bits of their own depend on values: under a compiler they are dynamic. None is
differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..backends.reference.per_group import buffer_size, elements_of
from ..tensors.levels import UNIFORM, check_levels
from ..tensors.packing import GROUP, Rows, packed_size
from ..tensors.philox import NEAREST, Seed
from ..tensors.validation import check_groups, has_values
from .declare import (
    ON_HOST,
    Call,
    are_concrete,
    check_equally_many,
    check_kind,
    check_result,
    check_seeds,
    declare,
    keys_of,
    shown_tensor,
)

_LEVELS = 'str levels="uniform"'
_ROWS = "Tensor packed, Tensor minimum, Tensor range"
_RESULT = f"int group_size, SymInt features, ScalarType dtype, {_LEVELS}"


# ---- samples of one number of bits, or of their own ------------------------------------------------------------------


@declare(
    f"per_group_quantize(Tensor x, int bits, int group_size, Tensor? seed, {_LEVELS}) -> (Tensor, Tensor, Tensor)",
    "per_group.quantize",
)
def per_group_quantize(x: Tensor, bits: int, group_size: int, seed: Tensor | None, levels: str = UNIFORM) -> Call:
    """Return packed codes (N, bytes), minima and ranges of `x` (N, D)."""
    check_integer("bits", bits, 1, 8)
    _check_rows("per_group_quantize", x, bits, group_size, seed, levels)
    return Call(
        fake=lambda: (
            x.new_empty(x.shape[0], packed_size(x.shape[1], bits), dtype=torch.uint8),
            *_empty_parameters(x, group_size),
        ),
        run=lambda kernel: kernel(x.contiguous(), bits, group_size, _key(seed), 0, levels),
    )


@declare(
    f"per_group_quantize_samples(Tensor x, Tensor bits, int group_size, Tensor? seed, Tensor room, {_LEVELS})"
    " -> (Tensor, Tensor, Tensor)",
    "per_group.quantize",
    ON_HOST,
)
def per_group_quantize_samples(
    x: Tensor, bits: Tensor, group_size: int, seed: Tensor | None, room: Tensor, levels: str = UNIFORM
) -> Call:
    """Return packed codes in `room` bytes, minima and ranges of samples with `bits` of their own."""
    _check_rows("per_group_quantize", x, bits, group_size, seed, levels)
    _check_sample_bits("per_group_quantize", x, bits, room)
    return Call(
        fake=lambda: (
            x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8),  # by the value of `room`
            *_empty_parameters(x, group_size),
        ),
        run=lambda kernel: kernel(x.contiguous(), bits, group_size, _key(seed), room.tolist()[0], levels),
    )


def _dequantize(
    packed: Tensor,
    minimum: Tensor,
    range: Tensor,
    bits: int | Tensor,
    group_size: int,
    features: int,
    dtype: torch.dtype,
    levels: str = UNIFORM,
) -> Call:
    """Return the dequantized codes, (N, features)."""
    check_result("per_group_dequantize", dtype, features)
    check_levels(levels, bits)
    if are_concrete(packed, minimum, range, features):
        N = minimum.shape[0] if minimum.dim() else 0
        parts = (packed, minimum, range)
        check_groups("per_group_dequantize", (N, features), bits, parts, group_size, minimum.device)

    def run(kernel: Any) -> Tensor:
        out = torch.empty(minimum.shape[0], features, dtype=dtype, device=minimum.device)
        kernel(packed, minimum, range, bits, group_size, out, levels)
        return out

    return Call(fake=lambda: minimum.new_empty(minimum.shape[0], features, dtype=dtype), run=run)


per_group_dequantize = declare(f"per_group_dequantize({_ROWS}, int bits, {_RESULT}) -> Tensor", "per_group.dequantize")(
    _dequantize
)
per_group_dequantize_samples = declare(
    f"per_group_dequantize_samples({_ROWS}, Tensor bits, {_RESULT}) -> Tensor", "per_group.dequantize", ON_HOST
)(_dequantize)


# ---- buffers, for torch.compile --------------------------------------------------------------------------------------


@declare(
    "per_group_quantize_buffers(Tensor[] xs, int[] bits, int[] group_sizes, Tensor? seeds, bool[] stochastic,"
    f" {_LEVELS}) -> Tensor[]",
    "per_group.quantize_buffers",
)
def per_group_quantize_buffers(
    xs: list[Tensor],
    bits: list[int],
    group_sizes: list[int],
    seeds: Tensor | None,
    stochastic: list[bool],
    levels: str = UNIFORM,
) -> Call:
    """Return for each tensor (…, D) its parameters and codes in one buffer, uint8 (…, `buffer_size` of D)."""
    op = "per_group_quantize_buffers"
    _check_groups(op, xs, bits, group_sizes, levels, stochastic)
    for x, group_size in zip(xs, group_sizes, strict=True):
        check_kind(op, x)
        if not x.dim() or x.shape[-1] % group_size or x.shape[-1] % GROUP:
            raise FewbitError(
                f"{op}: the last dimension of x is a multiple of {GROUP} and of group_size, {group_size}, not "
                f"{shown_tensor(x)}"
            )
    if any(stochastic) and seeds is None:
        raise FewbitError(f"{op}: stochastic rounding takes seeds, int64 ({len(xs)},)")
    if seeds is not None:
        check_seeds(seeds, seeds, len(xs))
        if seeds.shape[0] != len(xs):
            raise FewbitError(f"{op}: seeds are int64 ({len(xs)},), not {shown_tensor(seeds)}")
    return Call(
        fake=lambda: [
            x.new_empty(*x.shape[:-1], buffer_size(x.shape[-1], b, G), dtype=torch.uint8)
            for x, b, G in zip(xs, bits, group_sizes, strict=True)
        ],
        run=lambda kernel: kernel(xs, bits, group_sizes, seeds, stochastic, levels),
    )


@declare(
    f"per_group_dequantize_buffers(Tensor[] buffers, int[] bits, int[] group_sizes, ScalarType dtype, {_LEVELS})"
    " -> Tensor[]",
    "per_group.dequantize_buffers",
)
def per_group_dequantize_buffers(
    buffers: list[Tensor], bits: list[int], group_sizes: list[int], dtype: torch.dtype, levels: str = UNIFORM
) -> Call:
    """Return the tensors of which `per_group_quantize_buffers` gave the buffers."""
    op = "per_group_dequantize_buffers"
    check_result(op, dtype, 0)
    _check_groups(op, buffers, bits, group_sizes, levels)
    sizes: list[int] = []  # D, the elements whose codes are a buffer's last dimension
    for buffer, b, group_size in zip(buffers, bits, group_sizes, strict=True):
        size: Any = buffer.shape[-1] if buffer.dim() else -1
        D = elements_of(size, b, group_size)
        whole = D % group_size == 0 and D % GROUP == 0 and buffer_size(D, b, group_size) == size
        if buffer.dtype != torch.uint8 or not whole:
            raise FewbitError(f"{op}: no {b}-bit codes in groups of {group_size} take {shown_tensor(buffer)}")
        sizes.append(D)
    return Call(
        fake=lambda: [
            buffer.new_empty(*buffer.shape[:-1], D, dtype=dtype) for buffer, D in zip(buffers, sizes, strict=True)
        ],
        run=lambda kernel: kernel(buffers, bits, group_sizes, dtype, levels),
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_rows(op: str, x: Tensor, bits: int | Tensor, group_size: int, seed: Tensor | None, levels: str) -> None:
    check_kind(op, x)
    if x.dim() != 2:
        raise FewbitError(f"{op}: x has two dimensions, samples and elements, not {x.dim()}")
    check_integer("group_size", group_size, 1, 2**31)
    if seed is not None:
        check_seeds(x, seed, 1)
    check_levels(levels, bits)


def _check_sample_bits(op: str, x: Tensor, bits: Tensor, room: Tensor) -> None:
    N, D = x.shape
    if bits.dtype != torch.uint8 or bits.dim() != 1 or bits.device != x.device:
        raise FewbitError(f"{op}: the bits of samples are uint8 (N,) on {x.device}, not {shown_tensor(bits)}")
    if room.dtype != torch.int64 or room.shape != (1,) or room.device.type not in ("cpu", "meta"):
        raise FewbitError(f"{op}: the room is int64 (1,) on cpu, not {shown_tensor(room)}")
    if are_concrete(bits, N) and bits.shape[0] != N:
        raise FewbitError(f"{op}: there are {N} samples, and bits of {bits.shape[0]}")
    if not has_values(bits, room):
        return
    if room.item() < 0:
        raise FewbitError(f"{op}: the room is a number of bytes, not {room.item()}")
    if bits.device.type != "cpu":  # kernels of other devices write nothing beyond it, and nobody waits for the values
        return
    if bits.numel() and not bool(((bits - 1) < 8).all()):  # 0 − 1 is 255
        raise FewbitError(f"{op}: the bits of a sample are from 1 to 8")
    needed = int(Rows(N, D, bits).starts()[-1])
    if room.item() < needed:
        raise FewbitError(f"{op}: the codes take {needed} bytes, and there is room for {room.item()}")


def _check_groups(
    op: str,
    tensors: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    levels: str,
    *more: Sequence[int],
) -> None:
    """Raise FewbitError unless there are bits, which the levels have, a group size and all else for each tensor."""
    check_equally_many(op, tensors, bits, group_sizes, *more, have="bits, a group size and a rounding")
    for b in bits:
        check_integer("bits", b, 1, 8)
        check_levels(levels, b)
    for group_size in group_sizes:
        check_integer("group_size", group_size, 1, 2**31)


def _key(seed: Tensor | None) -> Seed:
    return NEAREST if seed is None else keys_of(seed)[0]


def _empty_parameters(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    N, D = x.shape
    G: Any = torch.sym_max(1, torch.sym_min(group_size, D))
    low, high = (x.new_empty(N, (D + G - 1) // G, dtype=torch.bfloat16) for _ in range(2))
    return low, high
