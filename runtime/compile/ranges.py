"""Ranges of a graph's values, whatever its inputs are: what `1 + x²` or `sigmoid(x)` cannot leave.

    lo, hi = ranges_of(graph)[node]      (1.0, inf) for 1 + x²

Interval arithmetic, in which a product of a value with itself is a square. What is not known is (−∞, ∞).
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .nodes import SAME, is_view, packet, shape_of, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
_NOT_NEGATIVE: Range = (0.0, math.inf)


def ranges_of(graph: fx.Graph) -> dict[fx.Node, Range]:
    """Return the range of each node's value."""
    found: dict[fx.Node, Range] = {}
    for node in graph.nodes:
        found[node] = _range(node, found)
    return found


def _range(node: fx.Node, known: Mapping[fx.Node, Range]) -> Range:
    x, name = tensor_of(node), packet(node)
    # A complex number has no range, nor has what are its parts, or bits of a number of another type.
    if node.op != "call_function" or name in _OF_PARTS or node.target is aten.view.dtype:
        return ANY
    if x is not None and x.is_complex():
        return ANY
    if x is not None and x.dtype == torch.bool:
        return (0.0, 1.0)
    if name in _FIXED:
        return _FIXED[name]
    arguments = [_of_argument(a, known) for a in node.args]
    if is_view(node) or name in _PASSING:
        return arguments[0] if arguments else ANY
    if name is aten.clamp:
        return _clamped(*arguments)
    if name is aten.mul and node.args[0] is node.args[1]:
        return _power(arguments[0], 2)
    scale: Any = node.kwargs.get("alpha", 1)
    if name is aten.sub and scale == 1 and _is_largest_of(node.args[1], node.args[0]):
        return (-math.inf, 0.0)
    if name in (aten.add, aten.sub):
        if isinstance(scale, fx.Node):  # a number that varies
            return ANY
        arguments[1] = _product(arguments[1], _number(-scale if name is aten.sub else scale))
        return _sum(*arguments)
    if name is aten.rsub and not node.kwargs:
        return _sum(arguments[1], (-arguments[0][1], -arguments[0][0]))
    if name is aten.copy:
        return arguments[1]
    if name is aten.div and node.kwargs.get("rounding_mode") is not None:
        lo, hi = _quotient(*arguments)
        return (math.floor(lo) if math.isfinite(lo) else lo), (math.ceil(hi) if math.isfinite(hi) else hi)
    if name is aten.softplus and node.args[1:2] not in ((), (1,)):  # of another slope
        return _NOT_NEGATIVE
    if name is aten.pow:
        exponent = node.args[1]
        return _power(arguments[0], exponent) if isinstance(exponent, int | float) else ANY
    rule = _RULES.get(name)
    return rule(*arguments) if rule is not None and None not in arguments[:3] else ANY


def _is_largest_of(node: Any, value: Any) -> bool:
    """Return whether each number of a node is the maximum over those of a value beside which it stands."""
    x = tensor_of(value) if isinstance(value, fx.Node) else None
    while isinstance(node, fx.Node) and (packet(node) in SAME or packet(node) is aten.expand):
        node = node.all_input_nodes[0]
    if x is None or not isinstance(node, fx.Node):
        return False
    shape = shape_of(node)
    while packet(node) in SAME or packet(node) in _IN_ORDER:
        node = node.all_input_nodes[0]
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    if packet(node) not in (aten.amax, aten.max) or node.args[0] is not value:
        return False
    given: Any = node.args[1] if len(node.args) > 1 else ()
    dims = {dim % max(x.ndim, 1) for dim in (given if isinstance(given, list | tuple) else (given,))}
    if not dims or len(dims) == x.ndim:
        return True
    # Rows' maxima that stand in a row, or are turned, are beside other rows' numbers.
    return shape == tuple("1" if dim in dims else str(size) for dim, size in enumerate(x.shape))


def _of_argument(value: Any, known: Mapping[fx.Node, Range]) -> Any:
    """Return the range of an argument; of a list what holds all its members; None for none."""
    if isinstance(value, fx.Node):
        return known.get(value, ANY)
    if isinstance(value, list | tuple) and value and all(isinstance(v, fx.Node) for v in value):
        return _union(*(known.get(v, ANY) for v in value))
    return _number(value) if isinstance(value, int | float) else None


def _number(value: float) -> Range:
    return (float(value), float(value))


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _product(a: Range, b: Range) -> Range:
    corners = [0.0 if 0.0 in (p, q) else p * q for p in a for q in b]  # 0 · ∞: the bound is not reached
    return min(corners), max(corners)


def _quotient(a: Range, b: Range, *_: Any) -> Range:
    if b[0] <= 0 <= b[1]:
        return _NOT_NEGATIVE if a[0] >= 0 and b[0] >= 0 else ANY
    return _product(a, (1 / b[1], 1 / b[0]))


def _power(a: Range, exponent: float) -> Range:
    if exponent < 0:
        return _quotient((1.0, 1.0), _power(a, -exponent))
    if math.isinf(exponent):
        return _NOT_NEGATIVE if a[0] >= 0 else ANY
    if exponent != int(exponent):
        return _monotone(lambda v: v**exponent)((max(a[0], 0.0), max(a[1], 0.0)))
    ends = _power_of(a[0], exponent), _power_of(a[1], exponent)
    even = exponent % 2 == 0
    return (0.0 if even and a[0] <= 0 <= a[1] else min(ends)), max(ends)


def _power_of(value: float, exponent: float) -> float:
    try:
        return value ** int(exponent)
    except OverflowError:
        return math.inf if value > 0 or exponent % 2 == 0 else -math.inf


def _union(*ranges: Range) -> Range:
    return min(lo for lo, _ in ranges), max(hi for _, hi in ranges)


def _monotone(function: Callable[[float], float]) -> Callable[..., Range]:
    """Return the rule of a function that does not fall."""

    def value(at: float) -> float:
        try:
            return function(at)
        except OverflowError:
            return math.inf
        except ValueError:  # outside of the domain
            return -math.inf

    return lambda a, *_: (value(a[0]), value(a[1]))


def _clamped(x: Range, lo: Range | None = None, hi: Range | None = None) -> Range:
    x = x if lo is None else (max(x[0], lo[0]), max(x[1], lo[1]))
    return x if hi is None else (min(x[0], hi[0]), min(x[1], hi[1]))


def _total(x: Range, *_: Any) -> Range:
    """Return the range of a sum over elements: its sign is theirs."""
    return (0.0 if x[0] >= 0 else -math.inf), (0.0 if x[1] <= 0 else math.inf)


_FIXED: Mapping[Any, Range] = {
    aten.sin: (-1.0, 1.0),
    aten.cos: (-1.0, 1.0),
    aten._softmax: (0.0, 1.0),
    aten._log_softmax: (-math.inf, 0.0),
    aten.rand: (0.0, 1.0),
    aten.bernoulli: (0.0, 1.0),
    aten.var: _NOT_NEGATIVE,
    aten.std: _NOT_NEGATIVE,
    aten.cosh: (1.0, math.inf),
    aten.acos: (0.0, math.pi),
    aten.asin: (-math.pi / 2, math.pi / 2),
    aten.atan: (-math.pi / 2, math.pi / 2),
    aten.atan2: (-math.pi, math.pi),
    aten.sign: (-1.0, 1.0),
}
_OF_PARTS = {aten.view_as_real, aten.real, aten.imag}
_IN_ORDER = {aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze}  # dimensions of size 1 come and go
# Results whose elements are, or lie between, elements of the first argument.
_PASSING = {aten.clone, aten._to_copy, prims.convert_element_type, aten.cat, aten.stack, aten.index, aten.gather}
_PASSING |= {aten.roll, aten.flip, prims.rev, aten.amax, aten.amin, aten.mean, aten.lift_fresh_copy, aten.repeat}
_PASSING |= {aten.expand, aten.index_select}
_RULES: Mapping[Any, Callable[..., Range]] = {
    aten.mul: lambda a, b, *_: _product(a, b),
    aten.div: _quotient,
    aten.reciprocal: lambda a: _quotient((1.0, 1.0), a),
    aten.neg: lambda a: (-a[1], -a[0]),
    aten.abs: lambda a: (max(a[0], -a[1], 0.0), max(-a[0], a[1])),
    aten.relu: lambda a: _clamped(a, (0.0, 0.0)),
    aten.exp: _monotone(math.exp),
    aten.exp2: _monotone(lambda v: math.exp(v * math.log(2))),
    aten.expm1: _monotone(math.expm1),
    aten.log: _monotone(lambda v: -math.inf if v == 0 else math.log(v)),
    aten.log1p: _monotone(lambda v: -math.inf if v == -1 else math.log1p(v)),
    aten.sqrt: lambda a: _power(a, 0.5),
    aten.rsqrt: lambda a: _power(a, -0.5),
    aten.sigmoid: _monotone(lambda v: 1 / (1 + math.exp(-v)) if v > -700 else 0.0),  # exp overflows from 709 on
    aten.tanh: _monotone(math.tanh),
    aten.erf: _monotone(math.erf),
    aten.softplus: _monotone(lambda v: max(v, 0.0) + math.log1p(math.exp(-abs(v)))),  # exp(v) itself may overflow
    aten.maximum: lambda a, b: _clamped(a, b),
    aten.minimum: lambda a, b: _clamped(a, None, b),
    aten.clamp_min: lambda a, b: _clamped(a, b),
    aten.clamp_max: lambda a, b: _clamped(a, None, b),
    aten.where: lambda _, a, b: _union(a, b),
    aten.sum: _total,
    aten.cumsum: _total,
    aten.full: lambda _, value: value,
    aten.scalar_tensor: lambda value: value,
}
