"""Look up the forward function of an op by name: one of torch's, an expression in x, or a user's callable.

Expressions mean the same in every process. A callable is known in the process that registered it, as long as its
`Forward` lives.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.traits import is_autocast
from .expressions import expression_function
from .torch_functions import FORWARDS, Forward

CALLABLE = "callable:"  # prefix of the names of callables
_expressions: dict[str, Forward] = {}
_callables: WeakValueDictionary[str, Forward] = WeakValueDictionary()


def forward_of(name: str) -> Forward:
    """Return the function called `name`: one in `FORWARDS`, an expression in x, or a registered callable.

    Raises:
        FewbitError: there is no such function.
    """
    return FORWARDS.get(name) or custom_forward(name)


# What autocast computes in float32 (ATen's autocast_mode.h), and returns so, but on the CPU; a square is a power. The
# three of convert/formulas.py begin with such a function: of what is widened before they give the same bits.
_IN_FLOAT32 = frozenset(("softplus", "squared_relu", "formula:new_gelu", "formula:sqrt_softplus", "formula:mish"))


def as_autocast(x: Tensor, function: str) -> Tensor:
    """Return `x` as autocast gives it to torch's function: an op sees no autocast where it is traced, kernels never."""
    if function not in _IN_FLOAT32 or x.dtype not in (torch.float16, torch.bfloat16):
        return x
    return x.float() if x.device.type != "cpu" and is_autocast(x) else x


def key_of(parameters: Sequence[float]) -> tuple[str, ...]:
    """Return a function's parameters as a key: 0.0 and -0.0 are one as numbers, and are two functions."""
    return tuple(map(repr, parameters))


def custom_forward(name: str) -> Forward:
    """Return the function of an expression or of a registered callable; raise `FewbitError` if there is none."""
    known = _expressions.get(name) or _callables.get(name)
    if known is not None:
        return known
    if name.startswith(CALLABLE):
        raise FewbitError(
            f"no {name.partition('#')[0]} in this process: its module is gone or elsewhere; "
            "an expression is known anywhere"
        )
    return _expressions.setdefault(name, Forward(expression_function(name)))


def register_callable(name: str, forward: Forward) -> None:
    """Register `forward` under `name`, which begins with `CALLABLE`, for `forward_of`, as long as `forward` lives."""
    _callables[name] = forward
