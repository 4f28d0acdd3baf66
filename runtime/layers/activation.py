"""ActNN's own way with an activation (Appendix B.3): its derivative f'(x) is saved in few bits, drawn without bias.

A table of this package (`fewbit.GELU`) keeps the code of an interval instead, which needs no group parameters and makes
the least error for its bits, with no noise but with a bias: f'(x) always becomes the same level. `fewbit.convert` takes
tables; at the levels L2 to L5 of ActNN, whose gradients are to be unbiased, it takes this layer wherever the table is
not exact.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from .base import CompressedLayer, apply, batched, check_first_derivative, compresses, keep, kept, refuse, saver_text
from .saver import Saver

__all__ = ["Activation"]


class Activation(CompressedLayer):
    """An elementwise activation that keeps its derivative in few bits.

    Args:
        function: a module without parameters, or another callable, each element of whose output depends on that element
            of its input alone. Called with more than one tensor, the layer is this function.
        bits, saver: as of every compressed layer.
        inplace: whether the input is overwritten; the function itself may do either.
    """

    def __init__(
        self, function: Callable[..., Tensor], *, bits: int = 4, saver: Saver | None = None, inplace: bool = False
    ) -> None:
        super().__init__(bits=bits, saver=saver)
        self.function, self.inplace = function, inplace

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the function returns."""
        if args or kwargs or not compresses(input):
            return self.function(input, *args, **kwargs)
        return apply(CompressedPointwise, input, self.function, self.saver, self.inplace)

    def extra_repr(self) -> str:
        """Return the function, where it is no module in this one, and what compresses."""
        if isinstance(self.function, nn.Module):
            return super().extra_repr()
        module = getattr(self.function, "__self__", None)  # whose forward it is
        name = repr(module) if isinstance(module, nn.Module) else getattr(self.function, "__name__", self.function)
        return f"{name}, {saver_text(self.saver)}"


class CompressedPointwise(Function):
    """x -> f(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], saver: Saver, inplace: bool) -> Tensor:
        """Return f(x), keep f'(x) compressed."""
        # What this small graph saves is gone at the end of this function: checkpoints and quantizers of saved tensors
        # are not to see it.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            leaf = x.detach().requires_grad_()
            y = function(leaf.clone() if inplace else leaf)
        (derivative,) = torch.autograd.grad(y, leaf, torch.ones((), dtype=y.dtype, device=y.device).expand_as(y))
        keep(ctx, saver.compress(batched(derivative, 2)))
        ctx.saver, ctx.dtype = saver, x.dtype
        if not inplace:
            return y.detach()
        ctx.mark_dirty(x)
        return x.copy_(y.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times f'."""
        check_first_derivative()
        (compressed,) = kept(ctx)
        ctx.saver.observe(batched(grads[0], 2))
        return (grads[0] * compressed.decompress().view(grads[0].shape)).to(ctx.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Refuse forward mode."""
        refuse()


def _same(x: Tensor) -> Tensor:
    return x
