"""Torch's own functions, by name: what every few-bit activation calls forward, and so equals bit for bit.

An op carries the name and the parameters as constants; `FORWARDS` gives the function. The name is also that of the
compiler's activation whose table replaces the derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...tables import FewbitError
from ...tables.names import number_text
from ..tensors.dtypes import DTYPES, arithmetic_dtype


@dataclass(frozen=True)
class Forward:
    """A pointwise function of torch.

    Attributes:
        call: (x, *parameters) -> y, torch's own function.
        out: (x, *parameters, out=y), writes into a given tensor what `call` returns; None where torch has none.
        inplace: (x, *parameters), overwrites x; None where torch has no in-place form of the function.
        parameters: names of the parameters, as the compiler calls them, with torch's defaults; None where it has none.
        bounds: whether the parameters bound pieces of f, and may be infinite.
        compares_in: where f' jumps at a parameter, the dtype to which torch rounds the parameter before it compares
            x of a given dtype with it.
        pure: whether equal x always give equal f(x); a user's callable may do as it likes.
    """

    call: Callable[..., Tensor]
    out: Callable[..., Tensor] | None = None
    inplace: Callable[..., Tensor] | None = None
    parameters: tuple[tuple[str, float | None], ...] = ()
    bounds: bool = False
    compares_in: Callable[[torch.dtype], torch.dtype] | None = None
    pure: bool = True

    def activation_name(self, name: str, values: Sequence[float]) -> str:
        """Return what the compiler calls the function `name` with these parameter values."""
        given = [
            f"{key}={number_text(value)}"
            for (key, default), value in zip(self.parameters, values, strict=True)
            if value != default
        ]
        return f"{name}({','.join(given)})" if given else name

    def as_compared(self, values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
        """Return the parameter values that decide where f' jumps for x of `dtype`: 0.1 is another number in float32."""
        if self.compares_in is None or dtype not in DTYPES:
            return values
        rounded = [_rounded(value, self.compares_in(dtype)) for value in values]
        # A finite bound that rounds to an infinite one stays: beyond all numbers of the dtype it does the same.
        return tuple(r if np.isfinite(r) else v for r, v in zip(rounded, values, strict=True))


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return `value` rounded as torch rounds a Python number: to the 16-bit types by way of float32.

    In NumPy, because the caller may stand under a mode that makes every new tensor a fake one.
    """
    if dtype == torch.float64:
        return value
    with np.errstate(over="ignore"):
        single = np.float32(value)
        if dtype == torch.float16:
            return float(np.float16(single))
    if dtype == torch.bfloat16:
        bits = int(single.view(np.uint32))
        upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # to nearest, ties to even
        return float(np.uint32(upper).view(np.float32))
    return float(single)


def _own_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


aten = torch.ops.aten

# ATen's SELU is its ELU with these constants (aten/src/ATen/native/Activation.cpp).
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_out(x: Tensor, *, out: Tensor) -> Tensor:
    return aten.gelu.out(x, approximate="tanh", out=out)


def _selu_out(x: Tensor, *, out: Tensor) -> Tensor:
    return aten.elu.out(x, _SELU_ALPHA, _SELU_SCALE, out=out)


def _celu_out(x: Tensor, alpha: float, *, out: Tensor) -> Tensor:
    return aten.elu.out(x, alpha, 1.0, 1.0 / alpha, out=out)


def _relu_out(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


def _relu6_out(x: Tensor, *, out: Tensor) -> Tensor:
    return aten.hardtanh.out(x, 0, 6, out=out)


def _logsigmoid(x: Tensor) -> Tensor:
    # On the CPU torch's result is row-major whatever x is, and its fake and its `out=` do not know that.
    return F.logsigmoid(x.contiguous() if x.is_cpu else x)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)  # operation by operation what `transformers` and CLIP have


def _squared_relu(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


_ALPHA = (("alpha", 1.0),)
_LAMBD = (("lambd", 0.5),)

FORWARDS: dict[str, Forward] = {
    "relu": Forward(torch.relu, _relu_out, torch.relu_),
    "relu6": Forward(F.relu6, _relu6_out, aten.relu6_.default),
    "leaky_relu": Forward(F.leaky_relu, aten.leaky_relu.out, aten.leaky_relu_.default, (("negative_slope", 0.01),)),
    "elu": Forward(F.elu, aten.elu.out, aten.elu_.default, _ALPHA),
    "celu": Forward(torch.celu, _celu_out, torch.celu_, _ALPHA),
    "selu": Forward(torch.selu, _selu_out, torch.selu_),
    "gelu": Forward(F.gelu, aten.gelu.out),
    "gelu_tanh": Forward(_gelu_tanh, _gelu_tanh_out),
    "silu": Forward(F.silu, aten.silu.out, aten.silu_.default),
    "mish": Forward(F.mish, aten.mish.out, aten.mish_.default),
    "softplus": Forward(F.softplus, aten.softplus.out, None, (("beta", 1.0), ("threshold", 20.0))),
    "softsign": Forward(F.softsign),
    "sigmoid": Forward(torch.sigmoid, aten.sigmoid.out),
    "logsigmoid": Forward(_logsigmoid),
    "tanh": Forward(torch.tanh, aten.tanh.out),
    "tanhshrink": Forward(F.tanhshrink),
    "hardtanh": Forward(
        F.hardtanh,
        aten.hardtanh.out,
        aten.hardtanh_.default,
        (("min_val", -1.0), ("max_val", 1.0)),
        bounds=True,
        compares_in=arithmetic_dtype,
    ),
    "hardsigmoid": Forward(F.hardsigmoid, aten.hardsigmoid.out, aten.hardsigmoid_.default),
    "hardswish": Forward(F.hardswish, aten.hardswish.out, aten.hardswish_.default),
    "hardshrink": Forward(F.hardshrink, aten.hardshrink.out, None, _LAMBD, bounds=True, compares_in=_own_dtype),
    "softshrink": Forward(F.softshrink, aten.softshrink.out, None, _LAMBD, compares_in=_own_dtype),
    "threshold": Forward(
        F.threshold,
        aten.threshold.out,
        aten.threshold_.default,
        (("threshold", None), ("value", None)),
        bounds=True,
        compares_in=arithmetic_dtype,
    ),
    # Beyond torch.nn:
    "quick_gelu": Forward(_quick_gelu),
    "squared_relu": Forward(_squared_relu),
}


def gelu_function(approximate: str) -> str:
    """Return the name in `FORWARDS` of GELU with torch's `approximate` argument."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if not isinstance(approximate, str) or approximate not in names:
        raise FewbitError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return names[approximate]
