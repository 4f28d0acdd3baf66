"""Fixed-point codes by the parameters of a normalization (BLPA); quantizers/fixed_point.py has the mathematics.

fixed_point_quantize(x, scale, shift, inner, bits) -> packed                      x dense, in memory order
fixed_point_dequantize(packed, scale, shift, inner, bits, count, dtype) -> x (count,)
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..tensors.packing import packed_size
from ..tensors.spec import as_dense
from ..tensors.validation import check_part
from .declare import IN_MEMORY_ORDER, Call, are_concrete, check_kind, check_result, declare, empty_codes


@declare(
    "fixed_point_quantize(Tensor x, Tensor scale, Tensor shift, SymInt inner, int bits) -> Tensor",
    "fixed_point.quantize",
    IN_MEMORY_ORDER,
)
def fixed_point_quantize(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Call:
    """Return the packed codes; `inner` elements lie from one channel to the next in memory."""
    check_kind("fixed_point_quantize", x)
    _check_vectors("fixed_point_quantize", x, scale, shift, inner, bits)
    return Call(
        fake=lambda: empty_codes(x, x.numel(), bits),
        run=lambda kernel: kernel(as_dense(x), scale, shift, inner, bits),
    )


@declare(
    "fixed_point_dequantize(Tensor packed, Tensor scale, Tensor shift, SymInt inner, int bits, SymInt count,"
    " ScalarType dtype) -> Tensor",
    "fixed_point.dequantize",
)
def fixed_point_dequantize(
    packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, count: int, dtype: torch.dtype
) -> Call:
    """Return the dequantized codes in memory order, (count,)."""
    op = "fixed_point_dequantize"
    check_result(op, dtype, count)
    _check_vectors(op, packed, scale, shift, inner, bits)
    if are_concrete(packed, count):
        check_part(op, "packed", packed, torch.uint8, (packed_size(count, bits),), packed.device)

    def run(kernel: Any) -> Tensor:
        out = torch.empty(count, dtype=dtype, device=packed.device)
        kernel(packed, scale, shift, inner, bits, out)
        return out

    return Call(fake=lambda: packed.new_empty(count, dtype=dtype), run=run)


def _check_vectors(op: str, x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> None:
    """Raise FewbitError unless `scale` and `shift` are one number a channel, on the device of `x`."""
    check_integer("bits", bits, 1, 8)
    right = all(v.is_floating_point() and v.dim() == 1 and v.layout == torch.strided for v in (scale, shift))
    if not right or scale.shape != shift.shape or not (scale.device == shift.device == x.device):
        raise FewbitError(f"{op}: scale and shift are floating-point (C,) on {x.device}")
    if type(inner) is int and inner < 1:
        raise FewbitError(f"{op}: inner, the elements from one channel to the next, is not below 1")
    if are_concrete(x, scale) and x.numel() and not scale.numel():
        raise FewbitError(f"{op}: there are elements and no channels")
