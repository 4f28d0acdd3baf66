"""An activation written as an expression in x: "x*sigmoid(1.702*x)".

Python's parser makes a syntax tree, of which only the node types handled in this file are accepted; Python never
evaluates it. Every node becomes a function from x to a value and its derivative by x (forward-mode differentiation),
by the rules of calculus:

    (u + v)' = u' + v'      (u v)' = u'v + u v'      (uᶜ)' = c uᶜ⁻¹ u'      g(u)' = g'(u) u'

where g is an `Activation`, so that g' stays accurate in both tails. Nodes record the conditions, such as u > 0 of
relu(u), that split the line into smooth pieces: the kinks are the points where a condition changes.
"""

import ast
import math
import warnings
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...tables.errors import FewbitError, shown
from ...tables.names import find_name, nearest_names, number_text
from .base import Activation, Vector
from .elementary import ELEMENTARY
from .enclosure import enclosed
from .kinks import reach_of, steps, switched
from .registry import FAMILIES, call_family, keyword_numbers

LONGEST = 1000  # characters, the same limit as in a table
_DEEPEST = 60
_CONSTANTS = {"pi": math.pi, "e": math.e}
_CHOICES = ("where", "max", "min", "clip")
_SPELLINGS = {"absolute": "abs", "maximum": "max", "minimum": "min", "clamp": "clip", "asinh": "arcsinh"}


class Dual(NamedTuple):
    """A value and its derivative by x; the derivative is None if the value does not depend on x."""

    value: Vector
    slope: Vector | None


Conditions = list[NDArray[np.bool_]]
Node = Callable[[Vector, Conditions], Dual]  # appends its conditions to the list
Condition = Callable[[Vector, Conditions], NDArray[np.bool_]]


def expression_tree(text: str) -> ast.expr | None:
    """Return the syntax tree of `text`, or None if it is not an expression in x."""
    tree = _parsed(text)
    return tree if tree is not None and _has_x(tree) else None


def check_variable(text: str) -> None:
    """Raise `FewbitError` if `text` is an expression in another variable; the message rewrites it in x."""
    tree = _parsed(text)
    if not isinstance(tree, ast.BinOp | ast.UnaryOp | ast.Call) or (isinstance(tree, ast.Call) and not tree.args):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [id(call.func) for call in calls]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    variables = {node.id for node in names if find_name(node.id, FAMILIES) is None and node.id not in _CONSTANTS}
    if not names or not all(isinstance(call.func, ast.Name) for call in calls):
        return
    problem = f"the variable of an expression is x, and {shown(text.strip())} has none"
    for node in names:
        if node.id not in _CONSTANTS:
            node.id = "x" if node.id in variables else f"{node.id}(x)"
    in_x = ast.unparse(tree).replace(" ", "")
    if len(variables) > 1 or expression_tree(in_x) is None:
        in_x = "an expression such as x*sigmoid(2*x)"
    raise FewbitError(f"{problem}: write {in_x}")


def _parsed(text: str) -> ast.expr | None:
    if len(text) > LONGEST or not text.isascii():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own warnings about odd literals
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def expression_activation(tree: ast.expr) -> Activation:
    """Return the activation that an expression in x describes.

    Raises:
        FewbitError: it contains an unsupported construct, which the message names.
    """
    node = _Reader().read(tree, 0)
    enclosure = enclosed(tree, _called, expression_number)
    name = ast.unparse(_Canonical().visit(tree)).replace(" ", "")
    if len(name) > LONGEST:
        raise FewbitError(f"an expression may have {LONGEST} characters, not {len(name)}")

    def function(x: Vector) -> Vector:
        with np.errstate(all="ignore"):
            return np.broadcast_to(node(x, []).value, np.shape(x)).copy()

    def derivative(x: Vector) -> Vector:
        with np.errstate(all="ignore"):
            value, slope = node(x, [])
            slope = np.zeros(np.shape(x)) if slope is None else slope
            # Where f is NaN (log of a negative number), its derivative is NaN too.
            return np.where(np.isnan(value), np.nan, np.broadcast_to(slope, np.shape(x)))

    def conditions(x: Vector) -> NDArray[np.bool_]:
        noted: Conditions = []
        with np.errstate(all="ignore"):
            node(x, noted)
        return np.stack(noted) if noted else np.zeros((0, x.size), bool)

    found = switched(conditions)
    smooth_beside = np.isfinite(derivative(found)) & np.isfinite(derivative(np.nextafter(found, np.inf)))
    kinks = tuple(found[smooth_beside].tolist())
    kinks, step = steps(derivative, kinks, function, enclosure)
    return Activation(name, function, derivative, kinks, step, reach_of(derivative), enclosure=enclosure)


def expression_number(tree: ast.expr) -> float:
    """Return the value of an expression without x; raises `FewbitError` if it is not accepted."""
    return float(_number(_Reader().read(tree, 0)))


class _Reader:
    """Converts the syntax tree to a `Node`; rejects unsupported nodes."""

    def read(self, tree: ast.expr, depth: int) -> Node:
        if depth > _DEEPEST:
            raise FewbitError(f"an expression may be nested {_DEEPEST} deep, not deeper")
        node = self._read(tree, depth + 1)
        if not _has_x(tree) and not np.isfinite(_number(node)):
            raise FewbitError(f"{shown(ast.unparse(tree))} in the expression is not a finite number")
        return node

    def _read(self, tree: ast.expr, depth: int) -> Node:
        match tree:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() as number):
                return _constant(number)
            case ast.Name(id="x"):
                return lambda x, _: Dual(x, np.ones(np.shape(x)))
            case ast.Name(id=name) if name in _CONSTANTS:
                return _constant(_CONSTANTS[name])
            case ast.Name(id=name):
                raise FewbitError(f"unknown name {shown(name)} in the expression; it has x, {', '.join(_CONSTANTS)}")
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _multiply(_constant(-1.0), self.read(operand, depth))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand, depth)
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if not (_has_x(left) and _has_x(right)):
                rule = _exponential if _has_x(right) else _power
                return rule(self.read(left, depth), self.read(right, depth))
            case ast.BinOp(op=ast.Pow()):
                raise FewbitError("x in a base and in its exponent: of the two one must be a number")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.read(left, depth), self.read(right, depth))
            case ast.Call(func=ast.Name(id=name)):
                return self._call(_SPELLINGS.get(name, name), tree, depth)
        part = shown(_unparsed(tree))
        raise FewbitError(
            f"cannot take {part} in an expression: it has numbers, x, + - * / **, functions, and where(x > 0, a, b)"
        )

    def _call(self, name: str, call: ast.Call, depth: int) -> Node:
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            raise FewbitError(f"{name} in the expression takes its arguments one by one")
        count = len(call.args)
        if name == "where":
            if count != 3 or call.keywords:
                raise FewbitError("where takes three arguments: where(x > 0, a, b)")
            return _where(
                self._condition(call.args[0], depth), self.read(call.args[1], depth), self.read(call.args[2], depth)
            )
        if name in ("max", "min", "clip"):
            if call.keywords or (count != 3 if name == "clip" else count < 2):
                accepted = "three arguments: clip(x, low, high)" if name == "clip" else "two arguments or more"
                raise FewbitError(f"{name} takes {accepted}")
            nodes = [self.read(argument, depth) for argument in call.args]
            if name == "clip":
                return _least(_greatest(nodes[0], nodes[1]), nodes[2])
            return reduce(_greatest if name == "max" else _least, nodes)
        function = _function(name, call)
        if count != 1:
            raise FewbitError(f"{name} takes one argument, and what else it takes by keyword, in an expression")
        return _chain(function, self.read(call.args[0], depth))

    def _condition(self, tree: ast.expr, depth: int) -> Condition:
        if not isinstance(tree, ast.Compare) or not all(type(op) in _COMPARISONS for op in tree.ops):
            raise FewbitError(f"a condition is a comparison by < <= > >=, not {shown(_unparsed(tree))}")
        nodes = [self.read(side, depth) for side in (tree.left, *tree.comparators)]
        compare = [_COMPARISONS[type(op)] for op in tree.ops]

        def condition(x: Vector, noted: Conditions) -> NDArray[np.bool_]:
            values = [node(x, noted).value for node in nodes]
            parts = [
                np.broadcast_to(op(a, b), np.shape(x))
                for op, a, b in zip(compare, values[:-1], values[1:], strict=True)
            ]
            noted.extend(parts)
            return np.logical_and.reduce(parts)

        return condition


class _Canonical(ast.NodeTransformer):
    """Rewrites numbers in their shortest form and functions by their canonical names."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        number = float(node.value) if isinstance(node.value, int | float) else 0.0
        return ast.Name(id=number_text(number), ctx=ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            name = _SPELLINGS.get(node.func.id, node.func.id)
            known = (*ELEMENTARY, *_CHOICES)
            node.func.id = name if name in known else find_name(name, FAMILIES) or name
        return node


def _unparsed(tree: ast.expr) -> str:
    try:
        return ast.unparse(tree)
    except (RecursionError, ValueError):
        return type(tree).__name__


def _has_x(tree: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "x" for node in ast.walk(tree))


def _function(name: str, call: ast.Call) -> Activation:
    """Return the function that `call` calls, its keyword numbers bound."""
    if name in ELEMENTARY and not call.keywords:
        return ELEMENTARY[name]
    numbers = keyword_numbers(call)
    if name in ELEMENTARY or numbers is None:
        raise FewbitError(
            f"cannot take the arguments of {shown(_unparsed(call))}: functions take x and keyword numbers"
        )
    if find_name(name, FAMILIES) is None:
        known = (*ELEMENTARY, *_CHOICES)
        near = nearest_names(name, (*known, *FAMILIES))
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}, and all activations by name"
        raise FewbitError(f"unknown function {shown(name)} in the expression; {hint}")
    return call_family(name, numbers)


def _called(call: ast.Call) -> Activation:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return _function(_SPELLINGS.get(name, name), call)


def _constant(number: float) -> Node:
    try:
        value = np.float64(number)
    except OverflowError:
        value = np.float64(math.inf)
    return lambda x, _: Dual(np.asarray(value), None)


def _chain(function: Activation, argument: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        u, slope = argument(x, noted)
        if slope is None:
            return Dual(function.function(u), None)
        noted.extend(u > kink for kink in function.kinks)
        # Where u is constant, so is g(u), even if g' is infinite there: sqrt(relu(x)) left of 0.
        return Dual(function.function(u), np.where(slope == 0, 0.0, function.derivative(u) * slope))

    return node


def _add(left: Node, right: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        (u, du), (v, dv) = left(x, noted), right(x, noted)
        return Dual(u + v, _total(du, dv))

    return node


def _multiply(left: Node, right: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        (u, du), (v, dv) = left(x, noted), right(x, noted)
        return Dual(u * v, _total(None if du is None else du * v, None if dv is None else u * dv))

    return node


def _divide(left: Node, right: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        (u, du), (v, dv) = left(x, noted), right(x, noted)
        ratio = u / v
        return Dual(ratio, _total(None if du is None else du / v, None if dv is None else -ratio * (dv / v)))

    return node


def _power(base: Node, exponent: Node) -> Node:
    c = _number(exponent)

    def node(x: Vector, noted: Conditions) -> Dual:
        u, slope = base(x, noted)
        if slope is None or c == 0:
            return Dual(np.power(u, c), None)
        return Dual(np.power(u, c), np.where(slope == 0, 0.0, c * np.power(u, c - 1) * slope))

    return node


def _exponential(base: Node, exponent: Node) -> Node:
    c = _number(base)

    def node(x: Vector, noted: Conditions) -> Dual:
        u, slope = exponent(x, noted)
        value = np.power(c, u)
        return Dual(value, None if slope is None else value * np.log(c) * slope)

    return node


def _number(node: Node) -> np.float64:
    """Return the value of a node without x."""
    with np.errstate(all="ignore"):
        return np.float64(node(np.zeros(1), []).value.flat[0])


def _where(condition: Condition, yes: Node, no: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        chosen = condition(x, noted)
        return _choose(chosen, yes(x, noted), no(x, noted))

    return node


def _greatest(left: Node, right: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        u, v = left(x, noted), right(x, noted)
        noted.append(np.broadcast_to(u.value > v.value, np.shape(x)))
        return _choose(noted[-1], u, v)

    return node


def _least(left: Node, right: Node) -> Node:
    def node(x: Vector, noted: Conditions) -> Dual:
        u, v = left(x, noted), right(x, noted)
        noted.append(np.broadcast_to(u.value > v.value, np.shape(x)))
        return _choose(noted[-1], v, u)

    return node


def _choose(condition: NDArray[np.bool_], yes: Dual, no: Dual) -> Dual:
    value = np.where(condition, yes.value, no.value)
    if yes.slope is None and no.slope is None:
        return Dual(value, np.zeros(value.shape))  # piecewise constant, yet dependent on x
    return Dual(
        value,
        np.where(condition, 0.0 if yes.slope is None else yes.slope, 0.0 if no.slope is None else no.slope),
    )


def _total(first: Vector | None, second: Vector | None) -> Vector | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _subtract(left: Node, right: Node) -> Node:
    return _add(left, _multiply(_constant(-1.0), right))


_ARITHMETIC: dict[type[ast.operator], Callable[[Node, Node], Node]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divide,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Vector, Vector], NDArray[np.bool_]]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}
