"""ActNN's activation layer (Appendix B.3): the derivative f'(x) is saved in few bits, rounded at random without bias.

A table of this package (`fewbit.GELU`) saves the code of an interval instead, which needs no group parameters and has
the least error for its bits, without noise but with a bias: f'(x) always becomes the same level. `fewbit.convert` uses
tables; at ActNN's levels L2 to L5, whose gradients must be unbiased, it uses this layer wherever the table is not
exact.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

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
    saver_text,
)
from .saver import Saver

__all__ = ["Activation"]


class Activation(CompressedLayer):
    """An elementwise activation that saves its derivative in few bits.

    Args:
        function: an elementwise module without parameters, or another elementwise callable. Calls with further
            arguments run this function itself.
        bits, saver: as for every compressed layer.
        inplace: whether the input is overwritten; the function itself may do either.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.Activation(torch.nn.GELU(), bits=2)
        layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    """

    function: Callable[..., Tensor]
    inplace: bool

    def __init__(
        self, function: Callable[..., Tensor], *, bits: int = 4, saver: Saver | None = None, inplace: bool = False
    ) -> None:
        super().__init__(bits=bits, saver=saver)
        self.function, self.inplace = function, inplace

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the function's output."""
        if args or kwargs or not compresses(input):
            return self.function(input, *args, **kwargs)
        return apply(CompressedPointwise, input, self.function, self.saver, self.inplace)

    def extra_repr(self) -> str:
        """Return the function, unless it is a submodule, and the saver."""
        if isinstance(self.function, nn.Module):
            return super().extra_repr()
        module = getattr(self.function, "__self__", None)  # whose forward it is
        name = repr(module) if isinstance(module, nn.Module) else getattr(self.function, "__name__", self.function)
        return f"{name}, {saver_text(self.saver)}"


class CompressedPointwise(CompressedFunction):
    """x -> f(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], saver: Saver, inplace: bool) -> Tensor:
        """Return f(x); save f'(x) compressed."""
        y, derivative = _with_derivative(function, x, inplace)
        keep(ctx, saver.compress(batched(derivative, 2)))
        ctx.saver, ctx.dtype = saver, x.dtype
        if not inplace:
            return y.detach()
        ctx.mark_dirty(x)
        x.copy_(y.detach())
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times f'."""
        check_first_derivative()
        (compressed,) = kept(ctx)
        compressed = observed(ctx.saver, compressed, batched(grads[0], 2))
        return (grads[0] * compressed.decompress().view(grads[0].shape)).to(ctx.dtype), None, None, None


def _with_derivative(function: Callable[..., Tensor], x: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
    """Return f(x) and f'(x)."""
    if is_compiling():  # by steps that a compiler can trace
        x = x.detach()
        y, derivative, *_ = torch.func.jvp(
            lambda leaf: function(leaf.clone() if inplace else leaf), (x,), (torch.ones_like(x),)
        )
        return y, derivative
    # The tensors of this small graph are freed when this function returns, so they bypass the saved-tensor hooks of
    # checkpoints and quantizers.
    with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
        leaf = x.detach().requires_grad_()
        y = function(leaf.clone() if inplace else leaf)
    (derivative,) = torch.autograd.grad(y, leaf, torch.ones((), dtype=y.dtype, device=y.device).expand_as(y))
    return y, derivative
