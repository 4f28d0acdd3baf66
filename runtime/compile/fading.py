"""Values that a gradient divides by what it multiplies with again, which codes do not follow.

    spoilt = fading(graph, facts, varying, of_gradient)     b / d² where b / d is computed of d = 1 + exp(2a) or 1 + a⁴
    products = meeting(graph, facts, varying, of_gradient)  g / (a² + .01) times 2a, of log(a² + .01)
    curves = crossing(graph, facts, varying)                sigmoid(b·exp(a))

The gradient of a is that of b / d times b / d² times d', here −2 exp(2a). A code of b / d² errs by a share of the
largest in its group also where d is large and b / d² next to nothing, and d' makes the error as large as itself: more
than the gradient's norm. So b is saved in codes, of as many bits, and divided again, or b / d² is saved exactly.

Beside a pole it is the same with any function of a, though 2a is none of d's operands, and a may have other places
there, as in log(flip(a²) + .01): where d is least, the gradient is largest, and 2a has to be as small as it is.

The gradient of sigmoid(b·exp(a)) turns where b is exp(−a), which may be less than a step of b's codes, and is large
there: with a's deviation 1.7 it was wrong by .9 of its norm, and by 1.6 for erf. There b and its product are exact.

Where d is a sum of exponentials, as in a softmax by hand, it is the same with b / d² and exp(a), and with exp(a) itself
where a gradient has been divided by d. Along the last dimension the sum is one number, by which no group is spoilt.
"""

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims

from ..quantizers.per_group import LEAST_ROW
from .codes import hint, memory_order
from .delicate import SCALING, Delicate, is_each, operands_of
from .nodes import is_pointwise, is_view, packet, packet_of, tensor_of
from .ranges import ANY

aten, prims = torch.ops.aten, torch.ops.prims

# Operators that pass on all their arguments, or multiples of them, and those that pass on the first one.
_PASSING = {aten.mul, aten.neg, aten.where, aten.clone, prims.convert_element_type, aten._to_copy}
_PASSING_FIRST = {aten.div, aten.pow}
_MULTIPLYING = {aten.mul, packet_of(getattr(inductor_prims, "fma", aten.mul))}
# Operators that give values other places.
_MOVING = {prims.rev, aten.cat, aten.roll, aten.index, aten._unsafe_index, aten.gather, aten.index_select, aten.sort}
_MOVING |= {aten.slice_scatter, aten.select_scatter, aten.scatter, aten.scatter_add, aten.index_put, aten.repeat}
_MOVING |= {aten.constant_pad_nd, aten.clone, aten.topk, aten.upsample_nearest2d, operator.getitem}
_SUMS = {aten.sum, aten.mean, aten.cumsum}
# Curves that turn near 0.
_CURVES = {aten.tanh, aten.sigmoid, aten.erf, aten.atan, aten.asinh, aten.exp, aten.softplus}
_MIXING = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward}


def fading(
    graph: fx.Graph, facts: Delicate, varying: Collection[fx.Node], of_gradient: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the values that are divided by one without a bound, and multiplied by such a one of the same origin.

    Args:
        graph: of both passes.
        facts: of its values.
        varying: values that are another for each element, and not computed from parameters alone.
        of_gradient: the nodes that depend on a gradient of the outputs.
    """
    unbounded = {n for n in varying if n not in of_gradient and math.inf in map(abs, facts.ranges.get(n, ANY))}
    sums = _sums(graph, facts.steep, of_gradient)
    growing = sums | {*facts.steep}
    divisors = _divisors(graph, unbounded, sums, of_gradient)
    factors = _factors(graph, unbounded, of_gradient) if divisors else {}
    found: set[fx.Node] = set()
    for node, dividing in divisors.items():
        products = [user for user in node.users if packet(user) in _MULTIPLYING]
        if node in of_gradient:
            found.update(i for product in products for i in product.all_input_nodes if i in growing)
            continue
        multiplying = {factor for product in products for factor in factors.get(product, ())}
        of_sums = dividing & sums and multiplying & growing
        found.update(i for i in node.args[:1] if _divisor(node) in dividing and i in growing)
        if of_sums or any(operands_of(f) & operands_of(d) & unbounded for f in multiplying for d in dividing):
            found.add(node)
    for node in reversed(graph.nodes):
        kind = divisors.get(node), node in growing
        like = [user for user in node.users if kind == (divisors.get(user), user in growing)]
        if node not in of_gradient and any(kind) and any(user in found for user in like):
            found.add(node)  # what such a value is a view or a multiple of would be saved in its place
    return found


def meeting(graph: fx.Graph, facts: Delicate, varying: set[fx.Node], of_gradient: Collection[fx.Node]) -> set[fx.Node]:
    """Return products of a value with a gradient that was divided, beside a pole, by one of the same origin.

    Args: as `fading` has them.
    """
    divided: dict[fx.Node, set[fx.Node]] = {}  # by gradient: the operands of what it was divided by
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in of_gradient or node.op == "output" or packet(node) in _MIXING:
            continue
        factors = [i for i in node.all_input_nodes if i not in of_gradient and i in varying and is_each(i, node)]
        origins = {o for i in node.all_input_nodes for o in divided.get(i, ())}
        multiplies = packet(node) in _MULTIPLYING
        if multiplies and origins and any(operands_of(f, _MOVING) & origins for f in factors):
            found.add(node)
        for factor in factors:
            if (multiplies and factor in facts.heavy) or facts.is_near_pole(factor, node):
                origins |= operands_of(factor, _MOVING) & varying
        if origins:
            divided[node] = origins
    return found


def crossing(graph: fx.Graph, facts: Delicate, varying: set[fx.Node]) -> set[fx.Node]:
    """Return curves of products with a value that grows without end, which turn within less than a code of the other.

    Args: as `fading` has them.
    """
    growing, products, found = {*facts.steep, *facts.heavy}, set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if packet(node) in _CURVES:
            found.update([node] if any(i in products for i in node.all_input_nodes) else [])
        elif node in growing and packet(node) in (aten.mul, aten.div):
            factors = [i for i in node.all_input_nodes if i in varying and is_each(i, node)]
            origins = [operands_of(i) & varying for i in factors]
            if len(factors) == 2 and not origins[0] & origins[1] and not growing.issuperset(factors):
                products.add(node)
        if (is_view(node) or packet(node) in SCALING) and any(i in products for i in node.all_input_nodes):
            products.add(node)
    return found


def _sums(graph: fx.Graph, steep: Collection[fx.Node], of_gradient: Collection[fx.Node]) -> set[fx.Node]:
    """Return sums over exponentials without a bound, and multiples of them, that differ within a group."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node in of_gradient or node.op != "call_function" or packet(node) in _MIXING:
            continue
        if is_pointwise(node) or is_view(node):
            is_sum = any(i in found for i in node.all_input_nodes)
        else:
            is_sum = any(i in steep and _differs_in_groups(node, i) for i in node.all_input_nodes[:1])
        if is_sum:
            found.add(node)
    return found


def _differs_in_groups(node: fx.Node, value: fx.Node) -> bool:
    """Return whether sums over a value, all that `node` gives, are others within a group of the value's elements."""
    x = tensor_of(value)
    dimensions: Any = node.args[1] if len(node.args) > 1 else None  # all of them, as none is
    if packet(node) not in _SUMS or x is None or not x.dim():
        return False
    if isinstance(dimensions, int):  # running sums
        return True
    innermost = (memory_order(x) or range(x.dim()))[-1]
    is_over_groups = innermost in [d % x.dim() for d in dimensions or ()] and hint(x.shape[innermost]) >= LEAST_ROW
    return bool(dimensions) and not is_over_groups


def _divisors(
    graph: fx.Graph, unbounded: Collection[fx.Node], sums: Collection[fx.Node], of_gradient: Collection[fx.Node]
) -> dict[fx.Node, set[fx.Node]]:
    """Return for each value that has been divided by what: gradients by sums, and others element by element, too."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node in of_gradient:
            passing = () if packet(node) in _MIXING else node.all_input_nodes
        elif packet(node) in _PASSING:
            passing = node.all_input_nodes
        else:
            passing = node.all_input_nodes[:1] if packet(node) in _PASSING_FIRST or is_view(node) else ()
        divisors = {d for value in passing for d in found.get(value, ()) if d in sums or node not in of_gradient}
        divisor = _divisor(node)
        if divisor in sums or (node not in of_gradient and divisor in unbounded and is_each(divisor, node)):
            divisors.add(divisor)
        if divisors:
            found[node] = divisors
    return found


def _divisor(node: fx.Node) -> Any:
    """Return what a node's value grows small with as it grows, None if there is nothing."""
    if packet(node) is aten.div:
        return node.args[1]
    is_power = packet(node) is aten.pow and isinstance(node.args[1], int | float) and node.args[1] < 0
    return node.args[0] if is_power or packet(node) in (aten.reciprocal, aten.rsqrt) else None


def _factors(
    graph: fx.Graph, unbounded: Collection[fx.Node], of_gradient: Collection[fx.Node]
) -> dict[fx.Node, set[fx.Node]]:
    """Return for each gradient what multiplies it afterwards."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node not in of_gradient or node.op == "output":
            continue
        users = [user for user in node.users if user.op != "output" and packet(user) not in _MIXING]
        found[node] = {f for user in users for f in found[user]}
        found[node] |= {a for user in users if packet(user) in _MULTIPLYING for a in user.args if a in unbounded}
    return found
