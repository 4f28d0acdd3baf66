"""The linear part of a pre-activation layer: a convolution or a Linear, and the linear maps folded into it.

Average pooling, flattening and padding come before the weights and need no saved activations: their gradient depends
only on shapes. So the backward pass applies them again to Ã₃, and nothing is saved for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

Map = Callable[[Tensor], Tensor]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Pad:
    """Padding, as ``torch.nn.functional.pad`` takes it."""

    amounts: tuple[int, ...]
    mode: str

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x`, padded."""
        return F.pad(x, self.amounts, mode=self.mode)


@dataclass(frozen=True)
class Convolution:
    """A convolution of 1, 2 or 3 dimensions.

    Attributes:
        before: linear maps without parameters, in order.
        stride, padding, dilation: one number a dimension.
        groups: as in torch.nn.
    """

    before: tuple[Map, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, bit for bit that of torch.nn."""
        convolve = _CONVOLVE[len(self.stride)]
        return convolve(_chain(self.before, x), weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Return the gradients of input, weight and bias; see `backward`."""
        nothing = [0] * len(self.stride)
        settings = (self.stride, self.padding, self.dilation, False, nothing, self.groups)
        return torch.ops.aten.convolution_backward(gradient, x, weight, [weight.shape[0]], *settings, list(needs))


@dataclass(frozen=True)
class Affine:
    """A matrix product on the last dimension."""

    before: tuple[Map, ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, bit for bit that of torch.nn."""
        return F.linear(_chain(self.before, x), weight, bias)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Return the gradients of input, weight and bias; see `backward`."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if needs[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


Linear = Convolution | Affine


def linear_of(module: nn.Module, before: Sequence[Map] = ()) -> Linear:
    """Return the linear part that `module`, of ``CONVOLUTIONS`` or nn.Linear, computes after the maps `before`."""
    if isinstance(module, nn.Linear):
        return Affine(tuple(before))
    assert isinstance(module, CONVOLUTIONS)
    rank = len(module.stride)
    padding, maps = module.padding, list(before)
    if module.padding_mode != "zeros":
        maps.append(Pad(tuple(module._reversed_padding_repeated_twice), module.padding_mode))
        padding = (0,) * rank
    elif isinstance(padding, str):  # "same" is uneven where dilation·(size − 1) is odd: torch pads the end by one
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(module.dilation, module.kernel_size, strict=True)
        ]
        if any(amount % 2 for amount in total):
            maps.append(Pad(tuple(n for amount in reversed(total) for n in (0, amount % 2)), "constant"))
        padding = tuple(amount // 2 for amount in total)
    return Convolution(tuple(maps), module.stride, tuple(padding), module.dilation, module.groups)


def backward(linear: Linear, gradient: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """Return the gradients of input, weight and bias.

    Args:
        linear: the linear part.
        gradient: of its output; its dtype is that of the arithmetic (autocast computes in 16 bits).
        x: its input. If no gradient of the weight is needed, only its shape and strides are used.
        weight: of the convolution or the matrix.
        needs: which of the three gradients to compute.
    """
    if linear.before and is_compiling():
        prepared = _as(_chain(linear.before, x), gradient.dtype)
        dx, dw, db = linear.backward(gradient, prepared, _as(weight, gradient.dtype), needs)
        if dx is not None:
            dx = _through(_as(dx, x.dtype), x, [_call_of(each) for each in linear.before])
    elif not linear.before:
        dx, dw, db = linear.backward(gradient, _as(x, gradient.dtype), _as(weight, gradient.dtype), needs)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            prepared = _chain(linear.before, leaf)
        inner, weight_there = _as(prepared.detach(), gradient.dtype), _as(weight, gradient.dtype)
        dx, dw, db = linear.backward(gradient, inner, weight_there, needs)
        if dx is not None:
            (dx,) = torch.autograd.grad(prepared, leaf, dx.to(prepared.dtype))
    return None if dx is None else _as(dx, x.dtype), None if dw is None else _as(dw, weight.dtype), db


Call = tuple[str, tuple[Any, ...]]  # a function of torch.nn.functional, and its arguments after the tensor


def _call_of(each: Map) -> Call:
    """Return a map as a name and constants, which a compiler can put into its graph."""
    if isinstance(each, Pad):
        return "pad", (each.amounts, each.mode)
    assert isinstance(each, nn.Module)
    if isinstance(each, nn.Flatten):
        return "flatten", (each.start_dim, each.end_dim)
    name, rank = type(each).__name__[:-2], type(each).__name__[-2:]
    if name == "AdaptiveAvgPool":
        return f"adaptive_avg_pool{rank}", (each.output_size,)
    more = () if rank == "1d" else (each.divisor_override,)
    window = (each.kernel_size, each.stride, each.padding, each.ceil_mode, each.count_include_pad)
    return f"avg_pool{rank}", (*window, *more)


@torch.compiler.allow_in_graph
def _through(gradient: Tensor, x: Tensor, calls: list[Call]) -> Tensor:
    """Return the gradient of the input of maps, of the shape of `x`; the compiler traces the steps of torch's own."""
    with torch.enable_grad():
        leaf = y = x.detach().requires_grad_()
        for name, arguments in calls:
            y = torch.flatten(y, *arguments) if name == "flatten" else getattr(F, name)(y, *arguments)
    return torch.autograd.grad(y, leaf, gradient)[0]


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # a no-op `to` takes a microsecond


def _chain(maps: Sequence[Map], x: Tensor) -> Tensor:
    for each in maps:
        x = each(x)
    return x
