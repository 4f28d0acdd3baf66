"""Few-bit activations of plain tensors, without the dispatcher: the path of training in eager mode.

An op goes from Python to torch's dispatcher, to Python for autograd, to the dispatcher again and to Python once more
for the kernels, and back the same way: that costs some 35 microseconds more than torch's own module, forward and
backward together, whatever the tensor's size. Compilers, transforms, modes and tensor subclasses need those steps, a
plain tensor does not. The remaining overhead over torch's module (1,000 elements, one core of an AMD EPYC of 2024,
microseconds):

    encode: tables looked up, codes allocated, the kernel called and run                   3
    multiply: the same, less torch's own backward                                          3
    torch.autograd.Function: its context and node, two calls from C++ to Python            5
    the module and this file: Python                                                       3
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backends.cpu import activation as cpu
from ..backends.cuda import activation as cuda
from ..ops.arguments import check_dtype, refuse
from ..tensors.layout import with_stride
from ..tensors.plain import is_plain


def activation(x: Tensor, function: str, parameters: Sequence[float], key: str) -> Tensor:
    """Return f(x) and save packed codes, as `ops.activation` does, outside of torch.func, for an `x` that is plain."""
    return _record(x, function, parameters, key)


class fewbit_activation(torch.autograd.Function):
    """x -> f(x); named like the op, because graphs show the name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: str, parameters: Sequence[float], key: str) -> Tensor:
        """Return f(x) and save its codes."""
        check_dtype(x, function)
        y, packed = (cuda if x.is_cuda else cpu).activation(x, function, parameters, key)
        ctx.save_for_backward(packed)
        ctx.key = key
        ctx.stride = y.stride()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return gradient · q(x)."""
        (packed,) = ctx.saved_tensors
        grad = grads[0]
        if is_plain(grad) and not torch.is_grad_enabled():
            backend = cuda if grad.is_cuda else cpu
            return backend.multiply(with_stride(grad, ctx.stride), packed, ctx.key), None, None, None
        return ops.gradient(grad, packed, ctx.key, ctx.stride), None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Refuse forward mode."""
        refuse()


# What fewbit_activation.apply calls once it has looked for transforms of torch.func, a tenth of a forward pass: none is
# active where this path is taken, and no plain tensor has outlived one.
_record = super(torch.autograd.Function, fewbit_activation).apply  # pyright: ignore[reportAttributeAccessIssue]
