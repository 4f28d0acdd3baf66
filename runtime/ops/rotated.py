"""Codes of turned groups; quantizers/rotated.py says what the parts are.

rotated_quantize(x, seed, bits, group_size, turns, unbiased) -> packed, scale          x (N, D); seed int64 (1,)
rotated_dequantize(packed, scale, seed, bits, group_size, turns, features, dtype) -> x   by the same seed
rotated_quantize_buffers(xs, key, offsets, bits, unbiased, group_size) -> buffers
rotated_dequantize_buffers(buffers, key, offsets, bits, features, group_size, dtype) -> xs

Buffers are those of tensors (…, D) turned twice, whose scales and codes are one tensor each; a seed is key + offset.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..backends.reference.rotated import TURNS, buffer_size
from ..tensors.packing import packed_size
from ..tensors.rotation import check_group_size, groups_of
from ..tensors.validation import check_part
from .declare import (
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

_OF_EACH = "a seed, bits and a form"


@declare(
    "rotated_quantize(Tensor x, Tensor seed, int bits, int group_size, int turns, bool unbiased) -> (Tensor, Tensor)",
    "rotated.quantize",
)
def rotated_quantize(x: Tensor, seed: Tensor, bits: int, group_size: int, turns: int, unbiased: bool) -> Call:
    """Return packed codes, uint8 (N, ⌈D/8⌉·b), and scales, bfloat16 (N, groups), of `x` (N, D)."""
    check_kind("rotated_quantize", x)
    if x.dim() != 2:
        raise FewbitError(f"rotated_quantize: x has two dimensions, rows and elements, not {x.dim()}")
    check_seeds(x, seed, 1)
    _check_codes(bits, group_size, turns)
    return Call(
        fake=lambda: (
            x.new_empty(x.shape[0], packed_size(x.shape[1], bits), dtype=torch.uint8),
            x.new_empty(x.shape[0], groups_of(x.shape[1], group_size), dtype=torch.bfloat16),
        ),
        run=lambda kernel: kernel(x.contiguous(), bits, group_size, turns, unbiased, keys_of(seed)[0]),
    )


@declare(
    "rotated_dequantize(Tensor packed, Tensor scale, Tensor seed, int bits, int group_size, int turns,"
    " SymInt features, ScalarType dtype) -> Tensor",
    "rotated.dequantize",
)
def rotated_dequantize(
    packed: Tensor,
    scale: Tensor,
    seed: Tensor,
    bits: int,
    group_size: int,
    turns: int,
    features: int,
    dtype: torch.dtype,
) -> Call:
    """Return the dequantized codes, (N, features)."""
    op = "rotated_dequantize"
    check_result(op, dtype, features)
    check_seeds(scale, seed, 1)
    _check_codes(bits, group_size, turns)
    if are_concrete(packed, scale, features):
        N = scale.shape[0] if scale.dim() else 0
        check_part(op, "packed", packed, torch.uint8, (N, packed_size(features, bits)), packed.device)
        check_part(op, "scale", scale, torch.bfloat16, (N, groups_of(features, group_size)), packed.device)

    def run(kernel: Any) -> Tensor:
        out = torch.empty(scale.shape[0], features, dtype=dtype, device=scale.device)
        kernel(packed, scale, bits, group_size, turns, keys_of(seed)[0], out)
        return out

    return Call(fake=lambda: scale.new_empty(scale.shape[0], features, dtype=dtype), run=run)


@declare(
    "rotated_quantize_buffers(Tensor[] xs, Tensor key, int[] offsets, int[] bits, bool[] unbiased, int group_size)"
    " -> Tensor[]",
    "rotated.quantize_buffers",
)
def rotated_quantize_buffers(
    xs: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    unbiased: Sequence[bool],
    group_size: int,
) -> Call:
    """Return for each tensor (…, D) its scales and codes in one buffer, uint8 (…, `buffer_size` of D)."""
    op = "rotated_quantize_buffers"
    check_equally_many(op, xs, offsets, bits, unbiased, have=_OF_EACH)
    for x, b in zip(xs, bits, strict=True):
        check_kind(op, x)
        if not x.dim() or (are_concrete(x) and not x.shape[-1]):
            raise FewbitError(f"{op}: rows have elements, not those of {shown_tensor(x)}")
        check_seeds(x, key, 1)
        _check_codes(b, group_size, TURNS)
    return Call(
        fake=lambda: [
            x.new_empty(*x.shape[:-1], buffer_size(x.shape[-1], b, group_size), dtype=torch.uint8)
            for x, b in zip(xs, bits, strict=True)
        ],
        run=lambda kernel: kernel(xs, key, offsets, bits, unbiased, group_size),
    )


@declare(
    "rotated_dequantize_buffers(Tensor[] buffers, Tensor key, int[] offsets, int[] bits, SymInt[] features,"
    " int group_size, ScalarType dtype) -> Tensor[]",
    "rotated.dequantize_buffers",
)
def rotated_dequantize_buffers(
    buffers: Sequence[Tensor],
    key: Tensor,
    offsets: Sequence[int],
    bits: Sequence[int],
    features: Sequence[int],
    group_size: int,
    dtype: torch.dtype,
) -> Call:
    """Return the tensors, (…, D) of each number of features, of which `rotated_quantize_buffers` gave the buffers."""
    op = "rotated_dequantize_buffers"
    check_equally_many(op, buffers, offsets, bits, features, have=_OF_EACH)
    for buffer, b, D in zip(buffers, bits, features, strict=True):
        check_result(op, dtype, D)
        check_seeds(buffer, key, 1)
        _check_codes(b, group_size, TURNS)
        if not are_concrete(buffer, D):
            continue
        if buffer.dtype != torch.uint8 or not buffer.dim() or buffer.shape[-1] != buffer_size(D, b, group_size):
            raise FewbitError(f"{op}: {b}-bit codes of rows of {D} elements do not take {shown_tensor(buffer)}")
    return Call(
        fake=lambda: [
            buffer.new_empty(*buffer.shape[:-1], D, dtype=dtype) for buffer, D in zip(buffers, features, strict=True)
        ],
        run=lambda kernel: kernel(buffers, key, offsets, bits, features, group_size, dtype),
    )


def _check_codes(bits: int, group_size: int, turns: int) -> None:
    check_integer("bits", bits, 1, 8)
    check_group_size(group_size)
    check_integer("turns", turns, 1, 2)
