"""act' as torch computes it, for modes that recompute act from the gate (`keep="inputs"` and `keep="exact"`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....tables import FewbitError

aten = torch.ops.aten


def _relu(grad: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(grad, x, 0)  # the same condition as f(x) > 0


def _sigmoid(grad: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(grad, torch.sigmoid(x))


def _tanh(grad: Tensor, x: Tensor) -> Tensor:
    return aten.tanh_backward(grad, torch.tanh(x))


def _gelu(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x)


def _gelu_tanh(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x, approximate="tanh")


# (gradient of f(x), x) -> gradient of x: the ops that torch's own backward pass calls.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": aten.silu_backward.default,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "mish": aten.mish_backward.default,
}


def derivative_of(function: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (gradient of f(x), x) -> gradient of x.

    Raises:
        FewbitError: no derivative of `function` is known.
    """
    if function not in DERIVATIVES:
        raise FewbitError(f"only keep='parts' takes {function}; the others take {', '.join(DERIVATIVES)}")
    return DERIVATIVES[function]
