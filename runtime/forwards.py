"""Torch's own functions, by name: what every few-bit activation calls forward, and so equals bit for bit.

An op carries the name and the parameters as constants; `FORWARDS` gives the function. The name is also that of the
compiler's activation whose table replaces the derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Forward:
    """A pointwise function of torch.

    Attributes:
        call: (x, *parameters) -> y, torch's own function.
        out: (x, *parameters, out=y), writes into a given tensor what `call` returns; None where torch has none.
        inplace: (x, *parameters), overwrites x; None where torch has no in-place form of the function.
        parameters: names of the parameters, as the compiler calls them, with torch's defaults.
    """

    call: Callable[..., Tensor]
    out: Callable[..., Tensor] | None = None
    inplace: Callable[..., Tensor] | None = None
    parameters: tuple[tuple[str, float], ...] = ()

    def activation_name(self, name: str, values: Sequence[float]) -> str:
        """Return what the compiler calls the function `name` with these parameter values."""
        given = [
            f"{key}={value:.17g}"
            for (key, default), value in zip(self.parameters, values, strict=True)
            if value != default
        ]
        return f"{name}({','.join(given)})" if given else name


# ATen's SELU is its ELU with these constants (aten/src/ATen/native/Activation.cpp).
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_out(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def _selu_out(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.elu.out(x, _SELU_ALPHA, _SELU_SCALE, out=out)


def _relu_out(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


FORWARDS: dict[str, Forward] = {
    "relu": Forward(torch.relu, _relu_out, torch.relu_),
    "gelu": Forward(F.gelu, torch.ops.aten.gelu.out),
    "gelu_tanh": Forward(_gelu_tanh, _gelu_tanh_out),
    "silu": Forward(F.silu, torch.ops.aten.silu.out, torch.ops.aten.silu_.default),
    "sigmoid": Forward(torch.sigmoid, torch.ops.aten.sigmoid.out),
    "tanh": Forward(torch.tanh, torch.ops.aten.tanh.out),
    "selu": Forward(torch.selu, _selu_out, torch.selu_),
    "softplus": Forward(F.softplus, torch.ops.aten.softplus.out, None, (("beta", 1.0), ("threshold", 20.0))),
}


def forward_of(name: str) -> Forward:
    """Return the function called `name`; raises KeyError if there is none."""
    return FORWARDS[name]
