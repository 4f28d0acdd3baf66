"""Few large values exactly, the rest in few bits (V-Quant); quantizers/outlier.py says what the parts are.

    outlier_quantize(x, bits, ratio, relu, value_dtype, sample_every) -> packed, counts, offsets, values, levels
    outlier_dequantize(packed, counts, offsets, values, levels, bits, relu, count, dtype) -> x (count,)

With a sampled threshold the number of outliers depends on values: under a compiler it is dynamic.
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..backends.reference.outlier import POSITION_BLOCK, count_of
from ..tensors.packing import packed_size
from ..tensors.traits import KINDS
from ..tensors.validation import check_part
from .declare import Call, are_concrete, check_kind, check_result, declare, empty_codes


@declare(
    "outlier_quantize(Tensor x, int bits, float ratio, bool relu, ScalarType? value_dtype, int sample_every)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "outlier.quantize",
)
def outlier_quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> Call:
    """Return the parts of `x` (n,)."""
    op = "outlier_quantize"
    check_kind(op, x)
    if x.dim() != 1:
        raise FewbitError(f"{op}: x has one dimension, not {x.dim()}")
    check_integer("bits", bits, 2 if relu else 1, 8)
    check_integer("sample_every", sample_every, 1)
    if not 0 <= ratio <= 1:
        raise FewbitError(f"{op}: ratio is a number from 0 to 1, not {ratio}")
    if value_dtype not in (None, *KINDS):
        raise FewbitError(f"{op}: value_dtype is float16, bfloat16 or float32, not {value_dtype}")

    def fake() -> tuple[Tensor, ...]:
        n = x.numel()
        k = count_of(n, ratio) if sample_every == 1 else torch.library.get_ctx().new_dynamic_size()
        counts = x.new_empty((n + POSITION_BLOCK - 1) // POSITION_BLOCK, dtype=torch.uint8)
        values = x.new_empty(k, dtype=value_dtype or x.dtype)
        levels = x.new_empty(2, dtype=torch.float32)
        return empty_codes(x, n, bits), counts, x.new_empty(k, dtype=torch.uint8), values, levels

    return Call(
        fake=fake,
        run=lambda kernel: kernel(x.contiguous(), bits, ratio, relu, value_dtype, sample_every),
    )


@declare(
    "outlier_dequantize(Tensor packed, Tensor counts, Tensor offsets, Tensor values, Tensor levels, int bits,"
    " bool relu, SymInt count, ScalarType dtype) -> Tensor",
    "outlier.dequantize",
)
def outlier_dequantize(
    packed: Tensor,
    counts: Tensor,
    offsets: Tensor,
    values: Tensor,
    levels: Tensor,
    bits: int,
    relu: bool,
    count: int,
    dtype: torch.dtype,
) -> Call:
    """Return the dequantized codes, and the outliers among them, (count,)."""
    op, parts = "outlier_dequantize", (packed, counts, offsets, values, levels)
    check_integer("bits", bits, 2 if relu else 1, 8)
    check_result(op, dtype, count)
    if are_concrete(*parts, count):
        device, k = packed.device, offsets.numel()
        if k > count:
            raise FewbitError(f"{op}: of {count} elements no {k} are outliers")
        check_part(op, "packed", packed, torch.uint8, (packed_size(count, bits),), device)
        check_part(op, "counts", counts, torch.uint8, (-(-count // POSITION_BLOCK),), device)
        check_part(op, "offsets", offsets, torch.uint8, (k,), device)
        if values.dtype not in KINDS:
            raise FewbitError(f"{op}: values are float16, bfloat16 or float32, not {values.dtype}")
        check_part(op, "values", values, values.dtype, (k,), device)
        check_part(op, "levels", levels, torch.float32, (2,), device)

    def run(kernel: Any) -> Tensor:
        out = torch.empty(count, dtype=dtype, device=packed.device)
        kernel(*parts, bits, relu, out)
        return out

    return Call(fake=lambda: packed.new_empty(count, dtype=dtype), run=run)
