"""Few-bit activations under torch.func (grad, vjp, vmap, jacrev and their compositions).

`torch.func.grad` always builds a graph of the gradient, so refusing it immediately, as `backward` does with
``create_graph=True``, is not possible. Instead the gradient depends on a `link` to x: an empty tensor that keeps
nothing alive, and whose own derivative is refused.

Codes are in row-major order here: the strides of a batched tensor are not those of each sample.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from .. import ops
from ..backends.forwards import forward_of
from ..ops.arguments import refuse
from ..tensors.traits import is_dense


def are_active() -> bool:
    """Return whether this call is inside a transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


def requires_grad(x: Tensor) -> bool:
    """Return whether a gradient by `x` is recorded, inside the transforms or outside; batched tensors hide it."""
    while not x.requires_grad and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.requires_grad


def keeps(x: Tensor) -> bool:
    """Return whether a gradient of f(x) is required, and codes must be saved: nested and sparse tensors have none."""
    if not torch.is_grad_enabled() or not is_dense(x):
        return False
    return x.requires_grad or (are_active() and requires_grad(x))


def activation(x: Tensor, function: str, parameters: Sequence[float], key: str) -> Tensor:
    """Return f(x), with the gradient given by the table; second derivatives and forward mode are refused."""
    return _Activation.apply(x, function, parameters, key)[0]


class _Activation(torch.autograd.Function):
    """x -> f(x), packed codes, link."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: str, parameters: Sequence[float], key: str) -> tuple[Tensor, Tensor, Tensor]:
        y = forward_of(function).call(x, *parameters)
        return y, ops.encode(x.reshape(-1), key), torch.zeros_like(x.reshape(-1)[:0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, packed, link = output
        ctx.mark_non_differentiable(packed)
        ctx.save_for_backward(packed, link)
        ctx.key = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        packed, link = ctx.saved_tensors
        return _Gradient.apply(grads[0], packed, link, ctx.key), None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse()


class _Gradient(torch.autograd.Function):
    """gradient, codes -> gradient · q(x); the link records that it depends on x as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, packed: Tensor, link: Tensor, key: str) -> Tensor:
        return ops.multiply(grad.reshape(-1), packed, key, (1,)).reshape(grad.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        refuse()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse()
