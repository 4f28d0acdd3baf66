"""ReLU that saves its output in RV-Quant codes instead of its mask (V-Quant, Section 4.5).

The codes distinguish true zeros from numbers rounded to zero, so the gradient is torch's own, bit for bit, from the
codes alone. The next layer saves the same codes, with their outliers, as its input (outlier_saver.py): one copy serves
both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import disable, is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from ..quantizers import Outlier, OutlierCompressed
from ..quantizers.outlier import masked
from ..tensors.spec import TensorSpec, as_dense, with_stride
from ..tensors.traits import DTYPES, is_batch, is_quantizable
from .base import CompressedFunction, apply, check_first_derivative
from .outlier_saver import leave
from .saver import TRACES_FUNCTIONS

# A network on digits reaches 97.8 % with it, 98.0 % by exact training (docs/methods/vquant.md).
DEFAULT = Outlier(3, 0.02, relu=True, value_dtype=torch.bfloat16)


class ValueAwareReLU(nn.ReLU):
    """`torch.nn.ReLU` with an exact gradient, which saves its output in few bits for itself and for the next layer.

    Tensors that quantizers do not accept (integers, tensors of torch.func, subclasses) go through torch's ReLU.

    Args:
        inplace: whether the input is overwritten.
        quantizer: an `Outlier` with ``relu=True``, or None for torch's own ReLU; may be changed at any time.

    Raises:
        FewbitError: the quantizer is not an `Outlier` with ``relu=True`` or None.

    Example:
        y = fewbit.vquant.ValueAwareReLU()(x)
    """

    def __init__(self, inplace: bool = False, quantizer: Outlier | None = DEFAULT) -> None:
        super().__init__(inplace)
        if quantizer is not None and not (isinstance(quantizer, Outlier) and quantizer.relu):
            raise FewbitError(f"a ReLU takes Outlier(..., relu=True) or None, not {shown(quantizer)}")
        self.quantizer = quantizer

    def forward(self, input: Tensor) -> Tensor:
        """Return max(0, input)."""
        if self.quantizer is None or not (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        return _relu(input, self.quantizer, self.inplace)

    def extra_repr(self) -> str:
        """Return torch's own arguments, the bits and the ratio."""
        q = self.quantizer
        shown = ["exact"] if q is None else [f"bits={q.bits}", f"ratio={q.ratio}"]
        return ", ".join([*filter(None, [super().extra_repr()]), *shown])


def _relu(x: Tensor, quantizer: Outlier, inplace: bool) -> Tensor:
    if is_compiling() and not TRACES_FUNCTIONS:
        return _relu_apart(x, quantizer, inplace)
    if not (x.dtype in DTYPES if is_compiling() else is_quantizable(x)):
        return nn.functional.relu(x, inplace)
    if is_compiling():  # which follows tensors that a function returns, not those that it hides in a list
        y, *parts = apply(_ReLU, x, quantizer, inplace, None)
        leave(y, OutlierCompressed(quantizer, TensorSpec.of(y), *parts))
        return y
    made: list[OutlierCompressed] = []
    y: Any = apply(_ReLU, x, quantizer, inplace, made)
    if as_dense(y) is y:
        leave(y, made[0])
    return y


# A compiled graph ends here, and the codes are left for layers that run in eager torch.
_relu_apart: Any = disable(_relu)


class _ReLU(CompressedFunction):
    """x -> max(0, x); the codes are appended to `made`, or if that is None returned in parts besides."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, quantizer: Outlier, inplace: bool, made: list[OutlierCompressed] | None
    ) -> Tensor | tuple[Tensor, ...]:
        y = x if inplace else torch.relu(x)
        if inplace:
            torch.relu_(x)
            ctx.mark_dirty(x)
        codes = quantizer.compress(y)
        ctx.save_for_backward(codes.packed)
        ctx.bits, ctx.shape, ctx.stride = quantizer.bits, codes.form.shape, codes.form.stride
        if made is None:
            parts = (codes.packed, codes.counts, codes.offsets, codes.values, codes.levels)
            ctx.mark_non_differentiable(*parts)
            return y, *parts
        made.append(codes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        check_first_derivative()
        (packed,) = ctx.saved_tensors
        grad = grads[0]
        if not is_compiling() and is_batch(grad):
            mask = masked(torch.empty_strided(ctx.shape, ctx.stride, device=packed.device).fill_(1), packed, ctx.bits)
            return torch.ops.aten.threshold_backward(grad, mask.to(grad.dtype), 0), None, None, None
        return masked(with_stride(grad, ctx.stride), packed, ctx.bits), None, None, None
