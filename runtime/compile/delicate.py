"""Where no rounded value will do: beside poles, under exponentials, inside periods.

    facts = Delicate.of(graph)
    facts.is_near_pole(u, user)     whether `user` may blow up beside u: log(u), 1 / u, acos(u) …
    facts.is_exponent(u, user)      whether `user` is an exponential of u that grows without end
    facts.is_periodic(u, user)      whether `user` is a sine of u, which may span several periods
    facts.heavy                     values beside poles, such as 1 / u: one dwarfs its group

A value is not near a pole if its range (ranges.py) ends well before it: 1 + x² does, relu(x) + 1e-6 does not. Its
error is that of a code, some hundredths of what is usual in a layer's outputs, and is not small beside 1e-6.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .codes import hint
from .nodes import is_pointwise, is_view, packet, tensor_of
from .ranges import ANY, Range, ranges_of

aten, prims = torch.ops.aten, torch.ops.prims

# Six bits of normal numbers err by .03, four by .12: a divisor of .5 then by a quarter, at the worst place.
_AWAY = 0.5
_BOUNDED = 2.5  # exp of less than that is a curve as others are; e^8 of a rounded 8 errs by a third
_NARROW = 8.0  # a range that sine and cosine go through about once, and in which nothing dwarfs the rest

# Where an operator or its derivative has no finite value, by operator: the argument's place, and such values of it.
_AT_ZERO = (aten.log, aten.log2, aten.log10, aten.sqrt, aten.rsqrt, aten.reciprocal, aten.lgamma, aten.digamma)
_AT_ONES = (aten.acos, aten.asin, aten.atanh, aten.erfinv)
_POLES: Mapping[Any, tuple[int, tuple[float, ...]]] = {
    **dict.fromkeys((*_AT_ZERO, aten.special_entr), (0, (0.0,))),
    **dict.fromkeys(_AT_ONES, (0, (-1.0, 1.0))),
    **dict.fromkeys((aten.logit, aten.special_ndtri), (0, (0.0, 1.0))),
    **dict.fromkeys((aten.div, aten.xlogy, aten.polygamma), (1, (0.0,))),
    aten.acosh: (0, (1.0,)),
    aten.log1p: (0, (-1.0,)),
    aten.special_xlog1py: (1, (-1.0,)),
}
_JOINT = (aten.atan2, aten.hypot)  # have a pole where both arguments are 0
# Operators whose results, and not only derivatives, grow without end there.
_GROWING = {aten.reciprocal, aten.rsqrt, aten.div, aten.pow, aten.tan, aten.lgamma, aten.digamma, aten.polygamma}
_TAMING = {aten.log, aten.log2, aten.log10, aten.log1p, aten.asinh}
_EXPONENTIALS = {aten.exp, aten.exp2, aten.expm1, aten.sinh, aten.cosh}
SCALING = {aten.mul, aten.div, aten.sub, aten.add, aten.neg, aten.clone, prims.convert_element_type, aten._to_copy}


@dataclass(frozen=True)
class Delicate:
    """What rounding would spoil in a graph.

    Attributes:
        ranges: of all values.
        heavy: values that a pole may blow up, each for itself.
        turning: values computed from sines of several periods, which no table holds.
        steep: values of exponentials that grow without end, and their sums and multiples.
        statistics: reductions and what is computed from them alone, which are saved exactly.
        levelled: values of which a statistic is gone, which are saved themselves (levelling.py).
    """

    ranges: Mapping[fx.Node, Range]
    heavy: Collection[fx.Node]
    turning: Collection[fx.Node]
    steep: Collection[fx.Node]
    statistics: Collection[fx.Node]
    levelled: Collection[fx.Node]

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        data: Collection[fx.Node],
        statistics: Collection[fx.Node],
        levelled: Collection[fx.Node] = (),
    ) -> "Delicate":
        """Return what is delicate in a graph.

        Args:
            graph: of both passes.
            data: values that are not computed from parameters alone, whose sizes change slowly.
            statistics: see above.
            levelled: see above.
        """
        heavy: set[fx.Node] = set()
        turning: set[fx.Node] = set()
        steep: set[fx.Node] = set()
        facts = cls(ranges_of(graph), heavy, turning, steep, statistics, levelled)
        for node in graph.nodes:
            if not is_pointwise(node) and not is_view(node) and packet(node) is not aten.cat:
                continue
            if any(i in turning or facts.is_periodic(i, node) for i in node.all_input_nodes):
                turning.add(node)
            if facts.is_steep(node):
                steep.add(node)
            lo, hi = facts.ranges[node]
            if any(i in heavy for i in node.all_input_nodes):
                grows = packet(node) not in _TAMING and hi - lo > _NARROW
            else:
                grows = packet(node) in _GROWING and any(
                    facts.is_near_pole(i, node) and i in data and i not in statistics and is_each(i, node)
                    for i in node.all_input_nodes
                )
            if grows:
                heavy.add(node)
        return facts

    def is_near_pole(self, node: fx.Node, user: fx.Node) -> bool:
        """Return whether `user`, or its derivative, may have a pole beside a value of `node`."""
        name = packet(user)
        if name is aten.tan:
            return self.is_periodic(node, user)
        if name is aten.pow:
            base, exponent = user.args[:2]
            is_polynomial = isinstance(exponent, int | float) and exponent >= 0 and float(exponent).is_integer()
            if base is not node or is_polynomial:
                return False
            return self._may_be(node, 0.0) or self.ranges.get(node, ANY)[0] < 0
        if name in _JOINT:
            return all(self._may_be(argument, 0.0) for argument in user.args)
        place, poles = _POLES.get(name, (0, ()))
        return any(self._may_be(node, pole) for pole in poles) and user.args[place] is node

    def is_steep(self, node: fx.Node) -> bool:
        """Return whether a value is that of an exponential that grows without end, or in proportion to such a value."""
        name = packet(node)
        if name in _EXPONENTIALS:
            return any(self._grows(i, node) for i in node.all_input_nodes)
        if name is aten.div:
            return node.args[0] in self.steep and not isinstance(node.args[1], fx.Node)
        passes = name in SCALING or name in (aten.pow, aten.cat) or is_view(node)
        return passes and any(i in self.steep for i in node.all_input_nodes)

    def is_exponent(self, node: fx.Node, user: fx.Node) -> bool:
        """Return whether `user` is an exponential of `node` without a bound, whose error multiplies."""
        is_power = packet(user) is aten.pow and len(user.args) > 1 and user.args[1] is node
        if packet(user) not in _EXPONENTIALS and not is_power:
            return False
        return self._grows(node, user) and not is_tamed(user, user)

    def _grows(self, node: fx.Node, exponential: fx.Node) -> bool:
        lo, hi = self.ranges.get(node, ANY)
        return hi > _BOUNDED or (packet(exponential) in (aten.sinh, aten.cosh) and lo < -_BOUNDED)

    def is_periodic(self, node: fx.Node, user: fx.Node) -> bool:
        """Return whether `user` goes through several periods in the range of `node`."""
        lo, hi = self.ranges.get(node, ANY)
        return packet(user) in (aten.sin, aten.cos, aten.tan) and hi - lo > _NARROW

    def _may_be(self, value: Any, pole: float) -> bool:
        lo, hi = self.ranges.get(value, ANY) if isinstance(value, fx.Node) else (float(value), float(value))
        return lo - _AWAY < pole < hi + _AWAY


def is_each(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a value is another for each element of `user`, and not for each row."""
    x, y = tensor_of(node), tensor_of(user)
    return x is not None and y is not None and hint(x.numel()) == hint(y.numel())


def is_tamed(value: fx.Node, exponential: fx.Node) -> bool:
    """Return whether all that reads an exponential, or that times something, is small however large it grows.

    1 / (1 + exp(−x)), log(1 + exp(x)) and exp(x) / (1 + exp(x)) are curves of x like others. ELU's, a branch of a
    choice by x, has a bound (branches.py).
    """
    users = [u for u in value.users if u.op != "output"]
    return bool(users) and all(
        packet(u) is aten.log1p
        or _is_one_more(u)
        or (packet(u) is aten.div and _is_one_more(u.args[1], exponential))
        or (packet(u) in SCALING and is_tamed(u, exponential))
        for u in users
    )


def _is_one_more(node: Any, than: fx.Node | None = None) -> bool:
    is_sum = isinstance(node, fx.Node) and packet(node) is aten.add and bool(node.args[1] == 1)
    return is_sum and (than is None or node.args[0] is than)


def operands_of(node: fx.Node, through: Collection[Any] = ()) -> set[fx.Node]:
    """Return what a value is computed from, element by element, or through those operators, too."""
    found, left = set(), [node]
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            passes = is_pointwise(value) or is_view(value) or packet(value) in through
            left += value.all_input_nodes if passes else []
    return found
