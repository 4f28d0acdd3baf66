"""act' as torch computes it, for modes that recompute act from the gate (`keep="inputs"` and `keep="exact"`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....tables import FewbitError

aten = torch.ops.aten


# (gradient of f(x), x) -> gradient of x: the ops that torch's own backward pass calls.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": aten.silu_backward.default,
    "gelu": lambda grad, x: aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),  # the same condition as f(x) > 0
    "sigmoid": lambda grad, x: aten.sigmoid_backward(grad, torch.sigmoid(x)),
    "tanh": lambda grad, x: aten.tanh_backward(grad, torch.tanh(x)),
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
