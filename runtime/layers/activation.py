"""ActNN's own way with an activation (Appendix B.3): its derivative f'(x) is saved in few bits, drawn without bias.

A table of this package (`fewbit.GELU`) keeps the code of an interval instead, which needs no group parameters and makes
the least error for its bits, with no noise; that is what `fewbit.convert` takes. This layer is there to compare, and
for functions that are smooth and hard to tabulate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .base import CompressedLayer, apply, batched, check_first_derivative, compresses, keep, kept, refuse
from .saver import Saver

__all__ = ["Activation"]


class Activation(CompressedLayer):
    """An elementwise activation that keeps its derivative in few bits.

    Args:
        function: a module without parameters, each element of whose output depends on that element of its input alone.
        bits, saver: as of every compressed layer.
    """

    def __init__(self, function: nn.Module, *, bits: int = 4, saver: Saver | None = None) -> None:
        super().__init__(bits=bits, saver=saver)
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        """Return what the function returns."""
        if not compresses(input):
            return self.function(input)
        return apply(CompressedPointwise, input, self.function, self.saver)


class CompressedPointwise(Function):
    """x -> f(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: nn.Module, saver: Saver) -> Tensor:
        """Return f(x), keep f'(x) compressed."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf)
        (derivative,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        keep(ctx, saver.compress(batched(derivative, 2)))
        ctx.saver = saver
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times f'."""
        check_first_derivative()
        (compressed,) = kept(ctx)
        ctx.saver.observe(batched(grads[0], 2))
        return grads[0] * compressed.decompress().view(grads[0].shape), None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Refuse forward mode."""
        refuse()
