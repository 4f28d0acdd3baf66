"""Softmax: its output is saved in few bits.

    ∇x = y (∇y − Σ y ∇y)

y occurs twice, as x̄ does in a normalization: one compressed copy biases the gradient by Var[ŷ] ∇y, two do not.
Measured (`plots/studies/bias.py`), the bias from one copy over 64 elements is 2.6 % of the gradient's norm at 2 bits;
over 256 elements, and at 4 bits, it is not distinguishable from 0, at a resolution of 1.1 and 0.3 %.
The gradient of the log-softmax, ∇y − softmax(x) Σ ∇y, uses it once and is unbiased.
"""

from typing import Any

from torch import Tensor, nn
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
from .normalization import CompressedNorm, copies_of
from .saver import Saver

__all__ = ["LogSoftmax", "Softmax", "softmax"]


class Softmax(CompressedNorm, nn.Softmax):
    """`torch.nn.Softmax`, which saves its output in few bits.

    (N, *) to the same shape, samples in dimension 0; float16, bfloat16, float32 or float64; the output is torch's,
    bit for bit.

    Args:
        args, kwargs: those of `torch.nn.Softmax`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.Softmax(-1, bits=4)
        layer(torch.randn(8, 64, requires_grad=True)).square().sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        dim = _dimension(self.dim, input)
        return softmax(input, dim, self.saver, self.copies)


class LogSoftmax(CompressedLayer, nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, which saves the softmax in few bits; its gradient has no bias.

    (N, *) to the same shape, samples in dimension 0; float16, bfloat16, float32 or float64; the output is torch's,
    bit for bit.

    Args:
        args, kwargs: those of `torch.nn.LogSoftmax`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.LogSoftmax(-1, bits=4)
        layer(torch.randn(8, 64, requires_grad=True))[:, 0].sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        if not compresses(input):
            return super().forward(input)
        return apply(CompressedLogSoftmax, input, _dimension(self.dim, input), self.saver)


def _dimension(dim: int | None, x: Tensor) -> int:
    """Return `dim`, or torch's default dimension if None."""
    return dim if dim is not None else 0 if x.dim() in (0, 1, 3) else 1


def softmax(input: Tensor, dim: int, saver: Saver, copies: int = 1) -> Tensor:
    """`torch.nn.functional.softmax`, which saves its output through `saver`.

    Args:
        input: (N, *), samples in dimension 0.
        dim: along which the output sums to 1.
        saver: compresses the output.
        copies: 1, or 2 for an unbiased gradient, at twice the memory.

    Returns:
        As `input`, torch's bit for bit.

    Example:
        saver = fewbit.layers.QuantizerSaver(fewbit.quantizers.PerGroup(bits=4))
        scores = torch.randn(8, 64, requires_grad=True)
        fewbit.layers.softmax(scores, -1, saver).square().sum().backward()
    """
    if not compresses(input):
        return F.softmax(input, dim)
    return apply(CompressedSoftmax, input, dim, saver, copies)


class CompressedSoftmax(CompressedFunction):
    """x -> softmax(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, saver: Saver, copies: int) -> Tensor:
        """Return torch's output; save it compressed."""
        y = F.softmax(x, dim)
        keep(ctx, copies_of(batched(y, 2), saver, copies, rows=dim in (-1, y.dim() - 1)))
        ctx.dim, ctx.saver, ctx.dtype = dim, saver, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        check_first_derivative()
        (compressed,) = kept(ctx)
        grad = grads[0]
        compressed = observed(ctx.saver, compressed, batched(grad, 2))
        ys = [c.decompress().view(grad.shape) for c in compressed]
        return (ys[0] * (grad - (ys[-1] * grad).sum(ctx.dim, keepdim=True))).to(ctx.dtype), None, None, None


class CompressedLogSoftmax(CompressedFunction):
    """x -> log softmax(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, saver: Saver) -> Tensor:
        """Return torch's output; save its exponential compressed."""
        y = F.log_softmax(x, dim)
        keep(ctx, copies_of(batched(y.exp(), 2), saver, 1, rows=dim in (-1, y.dim() - 1))[0])
        ctx.dim, ctx.saver, ctx.dtype = dim, saver, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        check_first_derivative()
        (compressed,) = kept(ctx)
        grad = grads[0]
        compressed = observed(ctx.saver, compressed, batched(grad, 2))
        return (
            (grad - compressed.decompress().view(grad.shape) * grad.sum(ctx.dim, keepdim=True)).to(ctx.dtype),
            None,
            None,
        )
