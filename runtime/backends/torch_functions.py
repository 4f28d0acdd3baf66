"""Torch's own functions, by name: every few-bit activation calls them forward, and so equals them bit for bit.

An op carries the name and the parameters as constants; `FORWARDS` gives the function, from the rows of
`activation_spec.py`. The name is also that of the compiler's activation whose table replaces the derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...tables import FewbitError
from ...tables.names import number_text
from ..tensors.traits import DTYPES, arithmetic_dtype
from .activation_spec import ROWS, ActivationRow


@dataclass(frozen=True)
class Forward:
    """A pointwise function of torch.

    Attributes:
        call: (x, *parameters) -> y, torch's own function.
        out: (x, *parameters, out=y), writes the result of `call` into a given tensor; None if torch has no such form.
        inplace: (x, *parameters), overwrites x; None if torch has no in-place form of the function.
        parameters: names of the parameters, as the compiler spells them, with torch's defaults; None if it has none.
        bounds: whether the parameters bound pieces of f, and may be infinite.
        compares_in: if f' jumps at a parameter, the dtype to which torch rounds the parameter before comparing x of a
            given dtype with it.
        pure: whether equal x always give equal f(x); a user's callable need not.
    """

    call: Callable[..., Tensor]
    out: Callable[..., Tensor] | None = None
    inplace: Callable[..., Tensor] | None = None
    parameters: tuple[tuple[str, float | None], ...] = ()
    bounds: bool = False
    compares_in: Callable[[torch.dtype], torch.dtype] | None = None
    pure: bool = True

    def activation_name(self, name: str, values: Sequence[float]) -> str:
        """Return the compiler's name of the function `name` with these parameter values."""
        given = [
            f"{key}={number_text(value)}"
            for (key, default), value in zip(self.parameters, values, strict=True)
            if value != default
        ]
        return f"{name}({','.join(given)})" if given else name

    def as_compared(self, values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
        """Return the parameter values at which f' jumps for x of `dtype`: 0.1 is another number in float32."""
        if self.compares_in is None or dtype not in DTYPES:
            return values
        rounded = [_rounded(value, self.compares_in(dtype)) for value in values]
        # A finite bound that rounds to an infinite one stays: beyond all numbers of the dtype it has the same effect.
        return tuple(r if np.isfinite(r) else v for r, v in zip(rounded, values, strict=True))


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return `value` rounded as torch rounds a Python number: to the 16-bit types by way of float32.

    In NumPy, because the caller may run under a mode that makes every new tensor a fake one.
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

# ---- adaptations of torch's functions that rows name without dots ----------------------------------------------------

# ATen's SELU is its ELU with these constants (aten/src/ATen/native/Activation.cpp).
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_out(x: Tensor, *, out: Tensor) -> Tensor:
    """Write GELU in its tanh form into `out`."""
    return aten.gelu.out(x, approximate="tanh", out=out)


def selu_out(x: Tensor, *, out: Tensor) -> Tensor:
    """Write SELU into `out`."""
    return aten.elu.out(x, _SELU_ALPHA, _SELU_SCALE, out=out)


def celu_out(x: Tensor, alpha: float, *, out: Tensor) -> Tensor:
    """Write CELU into `out`."""
    return aten.elu.out(x, alpha, 1.0, 1.0 / alpha, out=out)


def relu_out(x: Tensor, *, out: Tensor) -> Tensor:
    """Write ReLU into `out`."""
    return torch.clamp_min(x, 0, out=out)


def relu6_out(x: Tensor, *, out: Tensor) -> Tensor:
    """Write ReLU6 into `out`."""
    return aten.hardtanh.out(x, 0, 6, out=out)


def logsigmoid(x: Tensor) -> Tensor:
    """Return log σ(x), with the strides that torch's fake predicts."""
    # On the CPU torch's result is row-major whatever x is, which its fake and its `out=` do not model.
    return F.logsigmoid(x.contiguous() if x.is_cpu else x)


# ---- the functions by name -------------------------------------------------------------------------------------------


def torch_function(name: str) -> Callable[..., Tensor]:
    """Return the function that a row calls `name`: ``torch.relu``, or one of this module."""
    package, _, path = name.partition(".")
    return attrgetter(path)(torch) if package == "torch" else globals()[package]


_COMPARES_IN = {"own": _own_dtype, "arithmetic": arithmetic_dtype}


def _forward(row: ActivationRow) -> Forward:
    return Forward(
        call=torch_function(row.forward) if isinstance(row.forward, str) else row.forward,
        out=torch_function(row.out) if row.out else None,
        inplace=torch_function(row.overwrite) if row.overwrite else None,
        parameters=row.defaults,
        bounds=row.infinite,
        compares_in=_COMPARES_IN[row.compares_in] if row.compares_in else None,
    )


FORWARDS: dict[str, Forward] = {row.name: _forward(row) for row in ROWS}


def gelu_function(approximate: str) -> str:
    """Return the name in `FORWARDS` of GELU with torch's `approximate` argument."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if not isinstance(approximate, str) or approximate not in names:
        raise FewbitError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return names[approximate]
