"""Convolutions and transposed convolutions of 1 to 3 dimensions: the input is saved in few bits (ActNN, Appendix B.1).

    ∇W_Δ = Σ_{n,i} ∇y_{n,i} x̂ᵀ_{n,si+dΔ}

It is linear in x̂, so unbiased. With a frozen weight nothing of the input is saved. Padding other than zeros is a
separate linear map before the convolution, which saves nothing; the convolution then saves the padded input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from .base import (
    CompressedFunction,
    CompressedLayer,
    apply,
    batched,
    check_first_derivative,
    compresses,
    keep,
    kept,
    observed,
)
from .pooling import linear_map
from .saver import Saver, as_saver

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONVOLVE_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Arguments:
    """The arguments of a convolution of `dimensions` dimensions; the padding may be "same" or "valid"."""

    dimensions: int
    stride: Sequence[int]
    padding: Sequence[int] | str
    dilation: Sequence[int]
    groups: int
    transposed: bool = False
    output_padding: Sequence[int] = ()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return torch's convolution."""
        if self.transposed:
            assert not isinstance(self.padding, str), "torch's classes refuse it"
            convolve = _CONVOLVE_TRANSPOSED[self.dimensions]
            return convolve(
                *(x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            )
        return _CONVOLVE[self.dimensions](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias_size: int, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return torch's gradients of x, weight and bias; None for those not wanted."""
        if self.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, weight.shape[2:], strict=True)]
            before, after = [t // 2 for t in total], [t - t // 2 for t in total]
        else:
            before = after = [0] * self.dimensions if isinstance(self.padding, str) else list(self.padding)
        uneven = any(a != b for a, b in zip(before, after, strict=True))
        # "same" with an even kernel pads one side more: torch then pads the input itself, as is done here.
        more = [max(0, b - a) for a, b in zip(before, after, strict=True)]
        if uneven:
            x = F.pad(x, [pad for one in reversed(more) for pad in (0, one)])
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            *(grad, x, weight, [bias_size] if wanted[2] else None, self.stride, before, self.dilation),
            *(self.transposed, self.output_padding or [0] * self.dimensions, self.groups, list(wanted)),
        )
        if uneven and grad_x is not None:
            for dim, one in enumerate(more, start=grad_x.dim() - self.dimensions):
                grad_x = grad_x.narrow(dim, 0, grad_x.shape[dim] - one)
        return grad_x, grad_weight, grad_bias


class _Convolution(CompressedLayer, nn.modules.conv._ConvNd):
    """Base of the convolutions; torch's classes call the op in `_conv_forward`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Sequence[int] | str = self.padding
        dimensions = len(self.kernel_size)
        if self.padding_mode != "zeros":
            input = linear_map(input, "pad", self._reversed_padding_repeated_twice, self.padding_mode)
            padding = (0,) * dimensions
        arguments = Arguments(dimensions, self.stride, padding, self.dilation, self.groups)
        return _convolve(input, weight, bias, arguments, self.saver)


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, L) or (in_channels, L) to the same with out_channels and the sizes of torch; float16, bfloat16,
    float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.Conv1d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.Conv1d(3, 8, 3, padding=1, bits=2)
        layer(torch.randn(4, 3, 32)).sum().backward()
    """


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, H, W) or (in_channels, H, W) to the same with out_channels and the sizes of torch; float16,
    bfloat16, float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.Conv2d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.Conv2d(3, 8, 3, padding=1, bits=2)
        layer(torch.randn(4, 3, 8, 8)).sum().backward()
    """


class Conv3d(_Convolution, nn.Conv3d):
    """`torch.nn.Conv3d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, D, H, W) or (in_channels, D, H, W) to the same with out_channels and the sizes of torch;
    float16, bfloat16, float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.Conv3d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.Conv3d(3, 8, 3, padding=1, bits=2)
        layer(torch.randn(4, 3, 4, 4, 4)).sum().backward()
    """


class _TransposedConvolution(CompressedLayer, nn.modules.conv._ConvTransposeNd):
    """Base of the transposed convolutions."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return torch's output."""
        if self.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for {type(self).__name__}")
        dimensions = len(self.kernel_size)
        output_padding = self._output_padding(
            *(input, output_size, self.stride, self.padding, self.kernel_size, dimensions, self.dilation)  # pyright: ignore[reportArgumentType]
        )
        arguments = Arguments(
            *(dimensions, self.stride, self.padding, self.dilation, self.groups),
            transposed=True,
            output_padding=output_padding,
        )
        return _convolve(input, self.weight, self.bias, arguments, self.saver)


class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, L) or (in_channels, L) to the same with out_channels and the sizes of torch; float16, bfloat16,
    float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.ConvTranspose1d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.ConvTranspose1d(3, 8, 2, stride=2, bits=2)
        layer(torch.randn(4, 3, 32)).sum().backward()
    """


class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, H, W) or (in_channels, H, W) to the same with out_channels and the sizes of torch; float16,
    bfloat16, float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.ConvTranspose2d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.ConvTranspose2d(3, 8, 2, stride=2, bits=2)
        layer(torch.randn(4, 3, 8, 8)).sum().backward()
    """


class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, which saves its input in few bits (ActNN, Appendix B.1).

    (N, in_channels, D, H, W) or (in_channels, D, H, W) to the same with out_channels and the sizes of torch;
    float16, bfloat16, float32 or float64; the output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.ConvTranspose3d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.ConvTranspose3d(3, 8, 2, stride=2, bits=2)
        layer(torch.randn(4, 3, 4, 4, 4)).sum().backward()
    """


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, saver: Saver) -> Tensor:
    if not compresses(x, weight, bias):
        return arguments.forward(x, weight, bias)
    if is_compiling():  # with the codes that another layer has attached to the input
        saver = as_saver(saver).with_codes_of(x, -1)
    return apply(CompressedConvolution, x, weight, bias, arguments, saver)


class CompressedConvolution(CompressedFunction):
    """x, W, b -> W ∗ x + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, saver: Saver) -> Tensor:
        """Return torch's output; save x compressed."""
        _, weight_wanted = ctx.needs_input_grad[:2]
        sample = batched(x, arguments.dimensions + 2)
        # The weight is in memory anyway; torch's op needs its shape even for the gradient of the bias.
        keep(ctx, as_saver(saver).compress_once(sample) if weight_wanted else None, weight)
        ctx.arguments, ctx.saver, ctx.shape, ctx.single = arguments, saver, sample.shape, x.dim() < sample.dim()
        ctx.dtypes = [t if t is None else t.dtype for t in (x, weight, bias)]
        return arguments.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b."""
        check_first_derivative()
        compressed, weight = kept(ctx)
        grad = grads[0].unsqueeze(0) if ctx.single else grads[0]
        x = grad.new_empty(1).expand(ctx.shape)  # only its shape is used where nothing was saved
        if compressed is not None:
            x = observed(ctx.saver, compressed, grad).decompress().to(grad.dtype)  # autocast's
        wanted = list(ctx.needs_input_grad[:3])
        bias_size = grad.shape[1]
        found = ctx.arguments.backward(grad, x, weight.to(grad.dtype), bias_size, wanted)
        grad_x, grad_weight, grad_bias = (
            None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        )
        if ctx.single and grad_x is not None:
            grad_x = grad_x.squeeze(0)
        return grad_x, grad_weight, grad_bias, None, None
