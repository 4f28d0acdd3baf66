"""Pooling and resampling, all exact (ActNN, Appendix B.4).

max pooling       saves the place of the maximum within its window: 8 bits an output; torch the input and 64 bits
average pooling   saves nothing, torch the input: the gradient needs only its shape
resampling        saves nothing; of torch's modes only "area", an average pooling, saves the input
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from .. import ops
from ..backends.cpu import pooling as cpu
from ..backends.reference import pooling as reference
from ..ops.pooling import check_places
from ..tensors.traits import has_kernels, is_batch
from .base import CompressedFunction, apply, check_first_derivative, compresses

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
]

PLACES = 256  # in a window; more do not fit into a byte

# ---- maxima ----------------------------------------------------------------------------------------------------------


class _MaxPool(nn.modules.pooling._MaxPoolNd):
    """Base of the max poolings; windows of more than 256 places and `return_indices` run torch's own pooling."""

    dimensions: int
    kept_bits = 8  # for each output

    def forward(self, input: Tensor) -> Any:
        """Return torch's output."""
        window: list[Any] = [self.kernel_size, self.stride or self.kernel_size, self.padding, self.dilation]
        each = [(value,) if isinstance(value, int) else tuple(value) for value in window]
        kernel, stride, padding, dilation = (v * self.dimensions if len(v) == 1 else v for v in each)
        if self.return_indices or torch.Size(kernel).numel() > PLACES or not compresses(input):
            return super().forward(input)
        return apply(PackedMaxPool, input, kernel, stride, padding, dilation, self.ceil_mode)


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    """`torch.nn.MaxPool1d`, which saves a byte for each output; exact (ActNN, Appendix B.4).

    (N, C, L) or (C, L) to the same with the sizes of torch; float16, bfloat16, float32 or float64. Windows of more
    than 256 places, and `return_indices`, run torch's own pooling.

    Args:
        args, kwargs: those of `torch.nn.MaxPool1d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.MaxPool1d(2)
        pool(torch.randn(4, 3, 32, requires_grad=True)).sum().backward()
    """

    dimensions = 1


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    """`torch.nn.MaxPool2d`, which saves a byte for each output; exact (ActNN, Appendix B.4).

    (N, C, H, W) or (C, H, W) to the same with the sizes of torch; float16, bfloat16, float32 or float64. Windows of
    more than 256 places, and `return_indices`, run torch's own pooling.

    Args:
        args, kwargs: those of `torch.nn.MaxPool2d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.MaxPool2d(2)
        pool(torch.randn(4, 3, 8, 8, requires_grad=True)).sum().backward()
    """

    dimensions = 2


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    """`torch.nn.MaxPool3d`, which saves a byte for each output; exact (ActNN, Appendix B.4).

    (N, C, D, H, W) or (C, D, H, W) to the same with the sizes of torch; float16, bfloat16, float32 or float64.
    Windows of more than 256 places, and `return_indices`, run torch's own pooling.

    Args:
        args, kwargs: those of `torch.nn.MaxPool3d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.MaxPool3d(2)
        pool(torch.randn(4, 3, 4, 4, 4, requires_grad=True)).sum().backward()
    """

    dimensions = 3


class PackedMaxPool(CompressedFunction):
    """x -> the largest of each window."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        ceil_mode: bool,
    ) -> Tensor:
        """Return torch's output; save the place of each maximum in its window."""
        # Not as an op without kernels: on the meta device its temporary tensors would not be counted.
        pool = ops.max_pool if is_compiling() else cpu.max_pool if has_kernels(x) else reference.max_pool
        y, places = pool(x, kernel, stride, padding, dilation, ceil_mode)
        ctx.save_for_backward(places)
        ctx.window, ctx.shape = (kernel, stride, padding, dilation), x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, at the maxima."""
        check_first_derivative()
        (places,) = ctx.saved_tensors
        gradient = ops.max_pool_backward
        if not is_compiling():
            check_places(grads[0], places)
            gradient = reference.max_pool_backward if is_batch(grads[0]) else gradient
            gradient = cpu.max_pool_backward if has_kernels(grads[0]) and not is_batch(grads[0]) else gradient
        return gradient(grads[0], places, ctx.shape, *ctx.window), None, None, None, None, None


# ---- averages and resampling -----------------------------------------------------------------------------------------


class _LinearMap(nn.Module):
    """Base of averages and resampling: a function of torch, and the attributes that are its arguments."""

    kept_bits = 0
    function: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        return linear_map(input, self.function, *[getattr(self, name) for name in self.settings])


_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")


class AvgPool1d(_LinearMap, nn.AvgPool1d):
    """`torch.nn.AvgPool1d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, L) or (C, L) to the same with the sizes of torch; float16, bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.AvgPool1d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AvgPool1d(2)
        pool(torch.randn(4, 3, 32, requires_grad=True)).sum().backward()
    """

    function, settings = "avg_pool1d", _WINDOW


class AvgPool2d(_LinearMap, nn.AvgPool2d):
    """`torch.nn.AvgPool2d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, H, W) or (C, H, W) to the same with the sizes of torch; float16, bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.AvgPool2d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AvgPool2d(2)
        pool(torch.randn(4, 3, 8, 8, requires_grad=True)).sum().backward()
    """

    function, settings = "avg_pool2d", (*_WINDOW, "divisor_override")


class AvgPool3d(_LinearMap, nn.AvgPool3d):
    """`torch.nn.AvgPool3d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, D, H, W) or (C, D, H, W) to the same with the sizes of torch; float16, bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.AvgPool3d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AvgPool3d(2)
        pool(torch.randn(4, 3, 4, 4, 4, requires_grad=True)).sum().backward()
    """

    function, settings = "avg_pool3d", (*_WINDOW, "divisor_override")


class AdaptiveAvgPool1d(_LinearMap, nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, L) or (C, L) to the same with `output_size` in place of L; float16, bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.AdaptiveAvgPool1d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AdaptiveAvgPool1d(1)
        pool(torch.randn(4, 3, 32, requires_grad=True)).sum().backward()
    """

    function, settings = "adaptive_avg_pool1d", ("output_size",)


class AdaptiveAvgPool2d(_LinearMap, nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, H, W) or (C, H, W) to the same with `output_size` in place of H, W; float16, bfloat16, float32 or
    float64.

    Args:
        args, kwargs: those of `torch.nn.AdaptiveAvgPool2d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AdaptiveAvgPool2d(1)
        pool(torch.randn(4, 3, 8, 8, requires_grad=True)).sum().backward()
    """

    function, settings = "adaptive_avg_pool2d", ("output_size",)


class AdaptiveAvgPool3d(_LinearMap, nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d`, which saves nothing; exact (ActNN, Appendix B.4).

    (N, C, D, H, W) or (C, D, H, W) to the same with `output_size` in place of D, H, W; float16, bfloat16, float32
    or float64.

    Args:
        args, kwargs: those of `torch.nn.AdaptiveAvgPool3d`, which raise torch's errors.

    Example:
        pool = fewbit.layers.AdaptiveAvgPool3d(1)
        pool(torch.randn(4, 3, 4, 4, 4, requires_grad=True)).sum().backward()
    """

    function, settings = "adaptive_avg_pool3d", ("output_size",)


class Upsample(_LinearMap, nn.Upsample):
    """`torch.nn.Upsample`, which saves nothing in any mode; exact (ActNN, Appendix B.4).

    (N, C, L), (N, C, H, W) or (N, C, D, H, W) to the same with `size`, or `scale_factor` times the sizes; float16,
    bfloat16, float32 or float64.

    Args:
        args, kwargs: those of `torch.nn.Upsample`, which raise torch's errors.

    Example:
        grow = fewbit.layers.Upsample(scale_factor=2, mode="area")
        grow(torch.randn(4, 3, 8, 8, requires_grad=True)).sum().backward()
    """

    function = "interpolate"
    settings = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")


def linear_map(x: Tensor, function: str, *arguments: Any) -> Tensor:
    """Return ``torch.nn.functional.function(x, *arguments)``, a linear map whose gradient needs only a shape."""
    if not compresses(x):
        return getattr(F, function)(x, *arguments)
    if is_compiling():
        return _in_graph(x, function, arguments)
    return apply(LinearMap, x, function, arguments)


@torch.compiler.allow_in_graph
def _in_graph(x: Tensor, function: str, arguments: tuple[Any, ...]) -> Tensor:
    """Return the map of `x`; the compiler traces below autograd, because it does not trace the gradient's gradient."""
    return LinearMap.apply(x, function, arguments)  # pyright: ignore[reportReturnType]


class LinearMap(CompressedFunction):
    """x -> A x; A has no parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: str, arguments: tuple[Any, ...]) -> Tensor:
        """Return A x; record the shape of x."""
        ctx.function, ctx.arguments, ctx.shape, ctx.dtype = function, arguments, x.shape, x.dtype
        return getattr(F, function)(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return Aᵀ times the gradient, by torch's own backward at x = 0."""
        check_first_derivative()
        grad = grads[0]
        with torch.enable_grad():
            zero = torch.zeros((), dtype=ctx.dtype, device=grad.device).expand(ctx.shape).requires_grad_()
            y = getattr(F, ctx.function)(zero, *ctx.arguments)
        return torch.autograd.grad(y, zero, grad)[0], None, None
