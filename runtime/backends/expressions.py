"""An activation written as an expression in x, computed by torch: "x*sigmoid(1.702*x)".

The compiler parses, checks and differentiates the text (fewbit_gen/activations/expression.py); here the same syntax
tree is translated to torch's operations, and Python never evaluates the text. float16 and bfloat16 are computed in
float32 and rounded once, so that a long formula does not lose digits.
"""

import ast
import operator
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.dtypes import arithmetic_dtype
from .torch_functions import FORWARDS

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
    from ...fewbit_gen.activations.expression import expression_tree

    tree = expression_tree(canonical_text(text))  # the canonical text: its functions have one name each
    if tree is None:
        raise FewbitError(f"an expression has x in it, unlike {shown(text)}")
    node = _node(tree)

    def function(x: Tensor) -> Tensor:
        y = _tensor(node(x.to(arithmetic_dtype(x.dtype))), x).to(x.dtype)
        return y.clone() if y is x else y

    return function


def _node(tree: ast.expr) -> Node:
    from ...fewbit_gen.activations.expression import expression_number
    from ...fewbit_gen.activations.registry import keyword_numbers

    if not any(isinstance(part, ast.Name) and part.id == "x" for part in ast.walk(tree)):
        number = expression_number(tree)
        return lambda x: number
    match tree:
        case ast.Name():
            return lambda x: x
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _applied(torch.neg, _node(operand))
        case ast.UnaryOp(operand=operand):
            return _node(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _applied(_ARITHMETIC[type(op)], _node(left), _node(right))
        case ast.Call(func=ast.Name(id="where"), args=[condition, yes, no]):
            return _where(_condition(condition), _node(yes), _node(no))
        case ast.Call(func=ast.Name(id="clip"), args=[argument, low, high]):
            return _applied(_least, _applied(_greatest, _node(argument), _node(low)), _node(high))
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=arguments):
            choice = _greatest if name == "max" else _least
            return reduce(partial(_applied, choice), [_node(argument) for argument in arguments])
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            numbers = keyword_numbers(tree)
            assert numbers is not None, "the compiler takes numbers alone"
            return _applied(_function(name, numbers), _node(argument))
    raise AssertionError(f"the compiler takes {ast.unparse(tree)} and torch's side does not know it")


def _applied(function: Callable[..., Value], *nodes: Node) -> Node:
    return lambda x: function(*[node(x) for node in nodes])


def _where(condition: Callable[[Tensor], Tensor], yes: Node, no: Node) -> Node:
    return lambda x: torch.where(condition(x), _tensor(yes(x), x), _tensor(no(x), x))


def _condition(tree: ast.expr) -> Callable[[Tensor], Tensor]:
    assert isinstance(tree, ast.Compare), "the compiler takes comparisons alone"
    nodes = [_node(side) for side in (tree.left, *tree.comparators)]
    compare = [_COMPARISONS[type(op)] for op in tree.ops]

    def condition(x: Tensor) -> Tensor:
        values = [_tensor(node(x), x) for node in nodes]
        return reduce(torch.logical_and, [op(a, b) for op, a, b in zip(compare, values[:-1], values[1:], strict=True)])

    return condition


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


def _power(u: Value, v: Value) -> Value:
    if isinstance(v, Tensor) and not isinstance(u, Tensor):
        u = _tensor(u, v)  # torch's result is row-major for a power of a number, which its fakes do not predict
    return u**v


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
_ARITHMETIC: dict[type[ast.operator], Callable[..., Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
}
