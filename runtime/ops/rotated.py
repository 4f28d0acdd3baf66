"""Codes of turned groups; quantizers/rotated.py says what the parts are.

rotated_quantize(x, seed, bits, group_size, turns, unbiased) -> packed, scale          x (N, D); seed int64 (1,)
rotated_dequantize(packed, scale, seed, bits, group_size, turns, features, dtype) -> x   by the same seed
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.checks import check_integer
from ..tensors.packing import packed_size
from ..tensors.rotation import check_group_size, groups_of
from ..tensors.validation import check_part
from .arguments import are_concrete, check_kind, check_result, check_seeds, keys_of
from .declare import Call, declare


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


def _check_codes(bits: int, group_size: int, turns: int) -> None:
    check_integer("bits", bits, 1, 8)
    check_group_size(group_size)
    check_integer("turns", turns, 1, 2)
