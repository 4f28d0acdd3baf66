"""Values that a statistic of themselves is taken from, beside which what is left may be small.

    is_levelled(x, statistics)          whether x is u less its mean over other rows, or u by their deviation
    is_below_largest(x, statistics)     whether x is u less its largest
    of_short_rows(joint_graph)          what is divided by statistics of rows so short that a group has several
    unite(joint_graph)                  lets both passes write a difference alike

A code errs by a share of its group's range. Rows that hardly differ are little beside it once the mean over rows is
gone, and a feature of small deviation beside others once each is divided by its own: so what is left is saved in its
own codes, and not computed again from those of u. What is less than its largest is above it after rounding, so that
relu(u - max u) is not 0: there u is exact, if it is saved at all.

Of rows shorter than a group, as of heads of 16 features that a group or an RMS normalization takes one by one, one that
is small beside its neighbours is lost in their codes, and its gradient is divided by its deviation: that of a retention
was 13 times its norm off at 4 bits. Torch's gradients read such rows as they are, and so they are saved.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..quantizers.per_group import LEAST_ROW
from .codes import hint, memory_order
from .delicate import is_each, operands_of
from .nodes import (
    EXPONENTIALS,
    descendants,
    is_pointwise,
    is_view,
    operator_of,
    packet,
    shape_of,
    tensor_of,
    value_of,
)

aten = torch.ops.aten

_OF_ROWS = {aten.mean, aten.sum, aten.var, aten.var_mean, aten.std, aten.amax, aten.amin, aten.linalg_vector_norm}
_EXTREMES = {aten.amax, aten.amin, aten.max, aten.min}
_RESHAPING = {aten.squeeze, aten.unsqueeze, aten.view, aten._unsafe_view}


def is_levelled(node: fx.Node, statistics: Collection[fx.Node]) -> bool:
    """Return whether a value is another less a statistic of its own, or by one, that differs within groups of it.

    Args:
        node: the value.
        statistics: reductions and what is computed from them alone.
    """
    is_left = packet(node) in (aten.sub, aten.div) and node.args[1] in statistics
    if not is_left or not _differs_within_groups(node.args[1], node.args[0]):  # pyright: ignore[reportArgumentType]
        return False
    reduced = _own_reductions(node, statistics)
    return bool(reduced) and (packet(node) is aten.div or not all(packet(n) in _EXTREMES for n in reduced))


def is_below_largest(node: fx.Node, statistics: Collection[fx.Node]) -> bool:
    """Return whether a value is another less the largest, or the least, of its own elements."""
    reduced = _own_reductions(node, statistics) if packet(node) is aten.sub and node.args[1] in statistics else []
    return bool(reduced) and all(packet(n) in _EXTREMES for n in reduced)


def of_short_rows(graph: fx.Graph, statistics: Collection[fx.Node]) -> set[fx.Node]:
    """Return the values of which rows of fewer elements than a group has are divided by statistics of their own.

    Args:
        graph: of both passes.
        statistics: reductions and what is computed from them alone.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in statistics or not node.all_input_nodes or node.all_input_nodes[0] in statistics:
            continue
        value = node.all_input_nodes[0]
        if packet(value) not in EXPONENTIALS and _has_short_rows(node, value) and _divides(node, statistics):
            own = {i for i in operands_of(value) if i.op == "call_function" and is_each(i, value)}
            found |= own | {user for i in own for user in i.users if packet(user) is aten.sub and user.args[0] is i}
    # Twice divided they are others again: what is divided once is in the range of its neighbours.
    return found | {n for n in graph.nodes if packet(n) is aten.div and _is_divided_by(n.args[0], n.args[1], found)}


def _is_divided_by(node: Any, divisor: Any, values: Collection[fx.Node]) -> bool:
    return isinstance(node, fx.Node) and packet(node) is aten.div and node.args[1] is divisor and node.args[0] in values


def _has_short_rows(reduction: fx.Node, value: fx.Node) -> bool:
    """Return whether a reduction gives one number for each row of a value, and a row is less than a group."""
    x = tensor_of(value)
    given: Any = next((a for a in reduction.args[1:] if isinstance(a, list | tuple)), None)
    if packet(reduction) not in _OF_ROWS or x is None or not given:
        return False
    reduced = {dimension % x.dim() for dimension in given if hint(x.shape[dimension]) != 1}
    row = 1
    for dimension in reversed(memory_order(x) or range(x.dim())):
        if not reduced:
            return 1 < row < LEAST_ROW
        if dimension not in reduced and hint(x.shape[dimension]) != 1:
            return False  # of a channel, whose elements are in many rows
        reduced.discard(dimension)
        row *= hint(x.shape[dimension])
    return False


def _divides(statistic: fx.Node, statistics: Collection[fx.Node]) -> bool:
    """Return whether anything is divided by a statistic, or what is computed from it alone."""
    seen, left = {statistic}, [statistic]
    while left:
        node = left.pop()
        if packet(node) in (aten.rsqrt, aten.reciprocal):
            return True
        if any(packet(user) is aten.div and user.args[1] is node for user in node.users):
            return True
        following = [user for user in node.users if user in statistics and user not in seen]
        seen.update(following)
        left += following
    return False


def _own_reductions(node: fx.Node, statistics: Collection[fx.Node]) -> list[fx.Node]:
    """Return the reductions behind a second argument that are of what the first one is computed from."""
    value, statistic = node.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(statistic, fx.Node):
        return []
    own = operands_of(value) - {*statistics}
    reduced = _reductions_behind(statistic, statistics)
    return [n for n in reduced if n.all_input_nodes and own & operands_of(n.all_input_nodes[0])]


def _reductions_behind(node: fx.Node, statistics: Collection[fx.Node]) -> list[fx.Node]:
    found, left = [], [node]
    while left:
        made = operator_of(left.pop())
        inner = [i for i in made.all_input_nodes if i in statistics and (is_pointwise(made) or is_view(made))]
        left += inner
        found += [] if inner else [made]
    return found


def _differs_within_groups(statistic: fx.Node, value: Any) -> bool:
    """Return whether a statistic of several elements is another for some elements of a group of `value`."""
    x, s = tensor_of(value) if isinstance(value, fx.Node) else None, tensor_of(statistic)
    if x is None or s is None or hint(s.numel()) == hint(x.numel()):
        return False
    size = 1
    for dimension in reversed(memory_order(x) or range(x.dim())):
        place = dimension - x.dim()
        if -place <= s.dim() and hint(s.shape[place]) != 1:
            return True
        size *= hint(x.shape[dimension])
        if size >= LEAST_ROW:  # as `codes.groups_of` has it
            break
    return False


def unite(graph: fx.Graph) -> bool:
    """Let differences that follow in a joint graph read a statistic in the shape in which an earlier one reads it.

    A batch normalization takes (1, C, 1, 1) from its input in the forward pass, and in the backward pass the same by
    way of (C,). As two values each would be saved. Returns whether anything changed.
    """
    # Torch computes the places of a triangular mask twice, of nothing, and would save one mask in place of the two.
    of_inputs = descendants(graph, lambda node: node.op in ("placeholder", "get_attr"))
    known: dict[tuple[fx.Node, object], fx.Node] = {}
    changed = False
    for node in graph.nodes:
        if packet(node) is not aten.sub or node.args[1] not in of_inputs:
            continue
        statistic = origin = node.args[1]
        while packet(origin) in _RESHAPING:
            origin = origin.all_input_nodes[0]
        form = shape_of(statistic), value_of(statistic).dtype  # a view may be of the bits, as another type
        same = known.setdefault((origin, form), statistic)
        if same is not statistic:
            node.update_arg(1, same)
            changed = True
    return changed
