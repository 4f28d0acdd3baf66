"""Linear: the input is saved in few bits, if the weight requires a gradient (ActNN, Equations 3 and 9).

    ∇W = ∇Yᵀ X̂,   ∇X = ∇Y W,   ∇b = Σ ∇Y

∇W is linear in X̂, so unbiased. With a frozen weight nothing of the input is saved.
"""

from typing import Any

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
from .saver import Saver, as_saver

__all__ = ["Linear", "linear"]


class Linear(CompressedLayer, nn.Linear):
    """`torch.nn.Linear`, which saves its input in few bits (ActNN, Equations 3 and 9).

    (N, *, in_features) to (N, *, out_features), samples in dimension 0; float16, bfloat16, float32 or float64; the
    output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.Linear`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.Linear(128, 64, bits=2)
        layer(torch.randn(8, 16, 128)).sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        return linear(input, self.weight, self.bias, self.saver)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, saver: Saver, *, sample_dim: int = 0) -> Tensor:
    """`torch.nn.functional.linear`, which saves its input through `saver` (ActNN, Equations 3 and 9).

    Args:
        input: (*, in_features), of at least one dimension.
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        saver: compresses the input, if the weight requires a gradient.
        sample_dim: the dimension of the samples.

    Returns:
        (*, out_features), torch's bit for bit.

    Example:
        saver = fewbit.layers.QuantizerSaver(fewbit.quantizers.PerGroup(bits=2))
        weight = torch.randn(64, 128, requires_grad=True)
        fewbit.layers.linear(torch.randn(8, 128), weight, None, saver).sum().backward()
    """
    if not compresses(input, weight, bias):
        return F.linear(input, weight, bias)
    if is_compiling():  # with the codes that another layer has attached to the input
        saver = as_saver(saver).with_codes_of(input, sample_dim)
    return apply(CompressedLinear, input, weight, bias, saver, sample_dim)


class CompressedLinear(CompressedFunction):
    """x, W, b -> x Wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, saver: Saver, sample_dim: int) -> Tensor:
        """Return torch's output; save x compressed."""
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        samples = batched(x, 2).transpose(0, sample_dim)
        codes = as_saver(saver).compress_once(samples, rows=True) if weight_wanted else None
        keep(ctx, codes, weight if x_wanted else None)
        ctx.saver, ctx.sample_dim = saver, sample_dim
        ctx.dtypes = [t if t is None else t.dtype for t in (x, weight, bias)]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b."""
        check_first_derivative()
        (grad,) = grads
        compressed, weight = kept(ctx)
        grad_x = grad_weight = grad_bias = x = None
        if compressed is not None:
            compressed = observed(ctx.saver, compressed, batched(grad, 2).transpose(0, ctx.sample_dim))
            x = compressed.decompress().to(grad.dtype).transpose(0, ctx.sample_dim)  # in autocast's dtype
        rows = grad.reshape(-1, grad.shape[-1])
        if weight is not None:
            grad_x = (grad @ weight.to(grad.dtype)).to(ctx.dtypes[0])
        if x is not None:
            grad_weight = (rows.T @ x.reshape(-1, x.shape[-1])).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.dtypes[2])
        return grad_x, grad_weight, grad_bias, None, None
