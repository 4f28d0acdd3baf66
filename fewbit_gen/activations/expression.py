"""An activation written as an expression in x: "x*sigmoid(1.702*x)".

Python's parser makes a syntax tree, of which only the node types handled in this file are accepted; Python never
evaluates it. Read as an `Expression` (syntax.py) it becomes, among others, a function from x to a value and its
derivative by x (forward-mode differentiation), by the rules of calculus:

    (u + v)' = u' + v'      (u v)' = u'v + u v'      (uᶜ)' = c uᶜ⁻¹ u'      g(u)' = g'(u) u'

where g is an `Activation`, so that g' stays accurate in both tails. `Duals` notes the conditions, such as u > 0 of
relu(u), that split the line into smooth pieces: the kinks are the points where a condition changes.
"""

import ast
import math
import warnings
from collections.abc import Callable, Sequence
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
from .syntax import (
    Binary,
    Call,
    Choice,
    Comparison,
    Exponential,
    Expression,
    Negation,
    Number,
    Operation,
    Power,
    Variable,
    fold,
)

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


def read_expression(tree: ast.expr) -> Expression:
    """Return the expression that a syntax tree is.

    Raises:
        FewbitError: it contains an unsupported construct, which the message names.
    """
    return _read(tree, 0)


def expression_activation(tree: ast.expr) -> Activation:
    """Return the activation that an expression in x describes.

    Raises:
        FewbitError: it contains an unsupported construct, which the message names.
    """
    expression = read_expression(tree)
    node, enclosure = fold(expression, Duals()), enclosed(expression)
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


def _read(tree: ast.expr, depth: int) -> Expression:
    """Return the expression that `tree` is, `depth` deep in another; one without x is the number that it comes to."""
    if depth > _DEEPEST:
        raise FewbitError(f"an expression may be nested {_DEEPEST} deep, not deeper")
    read = _read_node(tree, depth + 1)
    if _has_x(tree):
        return read
    number = _number(read)
    if not np.isfinite(number):
        raise FewbitError(f"{shown(ast.unparse(tree))} in the expression is not a finite number")
    return Number(float(number), isinstance(tree, ast.Constant))


def _read_node(tree: ast.expr, depth: int) -> Expression:
    match tree:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return Number(_double(number), True)
        case ast.Name(id="x"):
            return Variable()
        case ast.Name(id=name) if name in _CONSTANTS:
            return Number(_CONSTANTS[name], False)
        case ast.Name(id=name):
            raise FewbitError(f"unknown name {shown(name)} in the expression; it has x, {', '.join(_CONSTANTS)}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Negation(_read(operand, depth))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _read(operand, depth)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if not (_has_x(left) and _has_x(right)):
            base, exponent = _read(left, depth), _read(right, depth)
            if isinstance(exponent, Number):
                return Power(base, exponent.value)
            return Exponential(float(_number(base)), exponent)
        case ast.BinOp(op=ast.Pow()):
            raise FewbitError("x in a base and in its exponent: of the two one must be a number")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return Operation(_ARITHMETIC[type(op)], _read(left, depth), _read(right, depth))
        case ast.Call(func=ast.Name(id=name)):
            return _read_call(_SPELLINGS.get(name, name), tree, depth)
    part = shown(_unparsed(tree))
    raise FewbitError(
        f"cannot take {part} in an expression: it has numbers, x, + - * / **, functions, and where(x > 0, a, b)"
    )


def _read_call(name: str, call: ast.Call, depth: int) -> Expression:
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise FewbitError(f"{name} in the expression takes its arguments one by one")
    count = len(call.args)
    if name == "where":
        if count != 3 or call.keywords:
            raise FewbitError("where takes three arguments: where(x > 0, a, b)")
        conditions = _read_conditions(call.args[0], depth)
        return Choice(conditions, _read(call.args[1], depth), _read(call.args[2], depth))
    if name in ("max", "min", "clip"):
        if call.keywords or (count != 3 if name == "clip" else count < 2):
            accepted = "three arguments: clip(x, low, high)" if name == "clip" else "two arguments or more"
            raise FewbitError(f"{name} takes {accepted}")
        parts = [_read(argument, depth) for argument in call.args]
        if name == "clip":
            return Operation("least", Operation("greatest", parts[0], parts[1]), parts[2])
        choice: Binary = "greatest" if name == "max" else "least"
        return reduce(lambda left, right: Operation(choice, left, right), parts)
    function = _function(name, call)
    if count != 1:
        raise FewbitError(f"{name} takes one argument, and what else it takes by keyword, in an expression")
    canonical = name if name in ELEMENTARY else find_name(name, FAMILIES) or name
    numbers = tuple((keyword_numbers(call) or {}).items())
    return Call(canonical, numbers, _read(call.args[0], depth), function)


def _read_conditions(tree: ast.expr, depth: int) -> tuple[Comparison, ...]:
    if not isinstance(tree, ast.Compare) or not all(isinstance(op, _COMPARED) for op in tree.ops):
        raise FewbitError(f"a condition is a comparison by < <= > >=, not {shown(_unparsed(tree))}")
    sides = [_read(side, depth) for side in (tree.left, *tree.comparators)]
    return tuple(
        Comparison(isinstance(op, ast.Lt | ast.Gt), *((b, a) if isinstance(op, ast.Gt | ast.GtE) else (a, b)))
        for op, a, b in zip(tree.ops, sides[:-1], sides[1:], strict=True)
    )


_ARITHMETIC: dict[type[ast.operator], Binary] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


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


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _number(expression: Expression) -> np.float64:
    """Return the value of an expression without x."""
    with np.errstate(all="ignore"):
        return np.float64(fold(expression, Duals())(np.zeros(1), []).value.flat[0])


class Duals:
    """The algebra of values and their derivatives by x."""

    def number(self, value: float, exact: bool) -> Node:
        """Return a constant."""
        return lambda x, _: Dual(np.asarray(np.float64(value)), None)

    def variable(self) -> Node:
        """Return x."""
        return lambda x, _: Dual(x, np.ones(np.shape(x)))

    def negate(self, u: Node) -> Node:
        """Return −u."""
        return self.multiply(self.number(-1.0, True), u)

    def add(self, left: Node, right: Node) -> Node:
        """Return u + v."""

        def node(x: Vector, noted: Conditions) -> Dual:
            (u, du), (v, dv) = left(x, noted), right(x, noted)
            return Dual(u + v, _total(du, dv))

        return node

    def subtract(self, left: Node, right: Node) -> Node:
        """Return u − v."""
        return self.add(left, self.negate(right))

    def multiply(self, left: Node, right: Node) -> Node:
        """Return u v."""

        def node(x: Vector, noted: Conditions) -> Dual:
            (u, du), (v, dv) = left(x, noted), right(x, noted)
            return Dual(u * v, _total(None if du is None else du * v, None if dv is None else u * dv))

        return node

    def square(self, argument: Node) -> Node:
        """Return u u."""

        def node(x: Vector, noted: Conditions) -> Dual:
            u, du = argument(x, noted)
            return Dual(u * u, None if du is None else du * u + u * du)

        return node

    def divide(self, left: Node, right: Node) -> Node:
        """Return u / v."""

        def node(x: Vector, noted: Conditions) -> Dual:
            (u, du), (v, dv) = left(x, noted), right(x, noted)
            ratio = u / v
            return Dual(ratio, _total(None if du is None else du / v, None if dv is None else -ratio * (dv / v)))

        return node

    def power(self, base: Node, c: float) -> Node:
        """Return uᶜ."""

        def node(x: Vector, noted: Conditions) -> Dual:
            u, slope = base(x, noted)
            if slope is None or c == 0:
                return Dual(np.power(u, c), None)
            return Dual(np.power(u, c), np.where(slope == 0, 0.0, c * np.power(u, c - 1) * slope))

        return node

    def exponential(self, c: float, exponent: Node) -> Node:
        """Return cᵘ."""

        def node(x: Vector, noted: Conditions) -> Dual:
            u, slope = exponent(x, noted)
            value = np.power(c, u)
            return Dual(value, None if slope is None else value * np.log(c) * slope)

        return node

    def call(self, call: Call, argument: Node) -> Node:
        """Return g(u), and note on which side of g's kinks u is."""
        function = call.function

        def node(x: Vector, noted: Conditions) -> Dual:
            u, slope = argument(x, noted)
            if slope is None:
                return Dual(function.function(u), None)
            noted.extend(u > kink for kink in function.kinks)
            # Where u is constant, so is g(u), even if g' is infinite there: sqrt(relu(x)) left of 0.
            return Dual(function.function(u), np.where(slope == 0, 0.0, function.derivative(u) * slope))

        return node

    def greatest(self, left: Node, right: Node) -> Node:
        """Return the greater of u and v, and note which it is."""

        def node(x: Vector, noted: Conditions) -> Dual:
            u, v = left(x, noted), right(x, noted)
            noted.append(np.broadcast_to(u.value > v.value, np.shape(x)))
            return _choose(noted[-1], u, v)

        return node

    def least(self, left: Node, right: Node) -> Node:
        """Return the lesser of u and v, and note which it is."""

        def node(x: Vector, noted: Conditions) -> Dual:
            u, v = left(x, noted), right(x, noted)
            noted.append(np.broadcast_to(u.value > v.value, np.shape(x)))
            return _choose(noted[-1], v, u)

        return node

    def choose(self, conditions: Sequence[tuple[bool, Node, Node]], yes: Node, no: Node) -> Node:
        """Return `yes` where the conditions hold, else `no`, and note the conditions."""

        def node(x: Vector, noted: Conditions) -> Dual:
            parts = []
            for strict, less, more in conditions:
                a, b = less(x, noted).value, more(x, noted).value
                parts.append(np.broadcast_to(a < b if strict else a <= b, np.shape(x)))
            noted.extend(parts)
            return _choose(np.logical_and.reduce(parts), yes(x, noted), no(x, noted))

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
