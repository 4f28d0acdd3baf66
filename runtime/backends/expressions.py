"""An activation written as an expression in x, computed by torch: "x*sigmoid(1.702*x)".

The compiler reads, checks and differentiates the text (fewbit_gen/activations/expression.py); here the same expression
becomes torch's operations, and Python never evaluates the text. float16 and bfloat16 are computed in
float32 and rounded once, so that a long formula does not lose digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.traits import arithmetic_dtype
from .torch_functions import FORWARDS

if TYPE_CHECKING:
    from ...fewbit_gen.activations.syntax import Call

Value = Tensor | float
Node = Callable[[Tensor], Value]


def canonical_text(text: str) -> str:
    """Return the compiler's spelling of `text`: without blanks, every function by its canonical name.

    Raises:
        FewbitError: the compiler does not accept `text`; the message says what is accepted.
    """
    from ...fewbit_gen.activations import parse_activation

    return parse_activation(text).name


def expression_function(text: str) -> Callable[[Tensor], Tensor]:
    """Return the function of torch tensors that an expression in x describes.

    The returned function takes any shape and floating-point dtype, and returns a new tensor like its input.

    Raises:
        FewbitError: `text` is not an expression in x that the compiler accepts.
    """
    from ...fewbit_gen.activations.expression import expression_tree, read_expression
    from ...fewbit_gen.activations.syntax import fold

    tree = expression_tree(canonical_text(text))
    if tree is None:
        raise FewbitError(f"an expression has x in it, unlike {shown(text)}")
    node = fold(read_expression(tree), Tensors())

    def function(x: Tensor) -> Tensor:
        y = _tensor(node(x.to(arithmetic_dtype(x.dtype))), x).to(x.dtype)
        return y.clone() if y is x else y

    return function


class Tensors:
    """The algebra of torch tensors, and of numbers where there is no x."""

    def number(self, value: float, exact: bool) -> Node:
        """Return a constant."""
        return lambda x: value

    def variable(self) -> Node:
        """Return x."""
        return lambda x: x

    def negate(self, u: Node) -> Node:
        """Return −u."""
        return lambda x: -u(x)

    def add(self, u: Node, v: Node) -> Node:
        """Return u + v."""
        return lambda x: u(x) + v(x)

    def subtract(self, u: Node, v: Node) -> Node:
        """Return u − v."""
        return lambda x: u(x) - v(x)

    def multiply(self, u: Node, v: Node) -> Node:
        """Return u v."""
        return lambda x: u(x) * v(x)

    def square(self, u: Node) -> Node:
        """Return u u."""
        return lambda x: (value := u(x)) * value

    def divide(self, u: Node, v: Node) -> Node:
        """Return u / v."""
        return lambda x: u(x) / v(x)

    def power(self, u: Node, c: float) -> Node:
        """Return uᶜ."""
        return lambda x: u(x) ** c

    def exponential(self, c: float, u: Node) -> Node:
        """Return cᵘ, of a tensor: torch's result is row-major for a power of a number, unlike what its fakes say."""

        def node(x: Tensor) -> Value:
            exponent = u(x)
            return _tensor(c, exponent) ** exponent if isinstance(exponent, Tensor) else c**exponent

        return node

    def greatest(self, u: Node, v: Node) -> Node:
        """Return the greater of u and v."""
        return lambda x: _greatest(u(x), v(x))

    def least(self, u: Node, v: Node) -> Node:
        """Return the lesser of u and v."""
        return lambda x: _least(u(x), v(x))

    def call(self, call: Call, u: Node) -> Node:
        """Return g(u)."""
        function = _function(call.name, dict(call.numbers))
        return lambda x: function(u(x))

    def choose(self, conditions: Sequence[tuple[bool, Node, Node]], yes: Node, no: Node) -> Node:
        """Return `yes` where the conditions hold, else `no`."""

        def node(x: Tensor) -> Tensor:
            compared = [
                (torch.lt if strict else torch.le)(_tensor(less(x), x), _tensor(more(x), x))
                for strict, less, more in conditions
            ]
            return torch.where(reduce(torch.logical_and, compared), _tensor(yes(x), x), _tensor(no(x), x))

        return node


def _function(name: str, arguments: dict[str, float]) -> Callable[..., Value]:
    """Return the function that an expression calls `name`, with its keyword numbers bound."""
    if name == "silu" and arguments:  # torch's silu has no beta
        beta = arguments["beta"]
        return lambda x: x * torch.sigmoid(beta * x)
    if name in _BEYOND:
        return _BEYOND[name]
    forward = FORWARDS[name]
    values = [arguments.get(key, default) for key, default in forward.parameters]
    return lambda x: forward.call(x, *values)


def _tensor(value: Value, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=arithmetic_dtype(like.dtype), device=like.device)


def _greatest(u: Value, v: Value) -> Value:
    if isinstance(u, Tensor) and isinstance(v, Tensor):
        return torch.maximum(u, v)
    return torch.clamp_min(u, v) if isinstance(u, Tensor) else _greatest(v, u)


def _least(u: Value, v: Value) -> Value:
    if isinstance(u, Tensor) and isinstance(v, Tensor):
        return torch.minimum(u, v)
    return torch.clamp_max(u, v) if isinstance(u, Tensor) else _least(v, u)


def _gaussian(x: Tensor) -> Tensor:
    return torch.exp(-x * x)


# Functions in expressions besides those of FORWARDS.
_BEYOND: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "arcsinh": torch.asinh,
    "arctan": torch.atan,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "abs": torch.abs,
    "sign": torch.sign,
    "gaussian": _gaussian,
}
