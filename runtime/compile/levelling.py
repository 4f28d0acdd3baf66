"""Values that a statistic of themselves is taken from, beside which what is left may be small.

    is_levelled(x, statistics)          whether x is u less its mean over other rows, or u by their deviation
    is_below_largest(x, statistics)     whether x is u less its largest
    of_short_rows(joint_graph)          what is divided by statistics of rows so short that a group has several
    unite(joint_graph)                  lets both passes write a difference alike
    scale_back(joint_graph, …)          lets gradients read u / s times s in place of u, s a deviation

A code errs by a share of its group's range. Rows that hardly differ are little beside it once the mean over rows is
gone, and a feature of small deviation beside others once each is divided by its own: so what is left is saved in its
own codes, and not computed again from those of u. What is less than its largest is above it after rounding, so that
relu(u - max u) is not 0: there u is exact, if it is saved at all.

Of rows shorter than a group, as of heads of 16 features that a group or an RMS normalization takes one by one, one that
is small beside its neighbours is lost in their codes, and its gradient is divided by its deviation: that of a retention
was 13 times its norm off at 4 bits. Torch's gradients read such rows as they are, and so they are saved.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ..quantizers.per_group import LEAST_ROW
from .codes import hint, memory_order
from .delicate import Delicate, is_each, operands_of
from .nodes import (
    EXPONENTIALS,
    ancestors,
    base_of,
    descendants,
    is_pointwise,
    is_view,
    of_gradients,
    operator_of,
    packet,
    shape_of,
    tensor_of,
    value_of,
)

aten = torch.ops.aten

_OF_ROWS = {aten.mean, aten.sum, aten.var, aten.var_mean, aten.std, aten.amax, aten.amin, aten.linalg_vector_norm}
_EXTREMES = {aten.amax, aten.amin, aten.max, aten.min}
_READ_INSTEAD = "fewbit read instead"  # the mark of v where gradients read it in place of u
_RESHAPING = {aten.squeeze, aten.unsqueeze, aten.view, aten._unsafe_view}


def is_levelled(node: fx.Node, statistics: Collection[fx.Node]) -> bool:
    """Return whether a value is another less a statistic of its own, or by one, that differs within groups of it.

    Args:
        node: the value.
        statistics: reductions and what is computed from them alone.
    """
    if packet(node) not in (aten.sub, aten.div, aten.mul) or not _is_of_own_statistic(node, statistics):
        return False
    statistic: Any = node.args[1]
    is_left = packet(node) is not aten.mul and packet(statistic) is not aten.expand
    return is_left or bool(node.meta.get(_READ_INSTEAD))


def _is_of_own_statistic(node: fx.Node, statistics: Collection[fx.Node]) -> bool:
    """Return whether the second argument is a statistic of the first, and differs within groups of it."""
    if node.args[1] not in statistics or not differs_within_groups(node.args[1], node.args[0]):
        return False
    reduced = _own_reductions(node, statistics)
    return bool(reduced) and (packet(node) is not aten.sub or not all(packet(n) in _EXTREMES for n in reduced))


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
    return found


def _has_short_rows(reduction: fx.Node, value: fx.Node) -> bool:
    """Return whether a reduction gives one number for each row of a value, and a row is less than a group."""
    x = tensor_of(value)
    given: Any = next((a for a in reduction.args[1:] if isinstance(a, list | tuple)), None)
    if packet(reduction) not in _OF_ROWS or x is None or not given or x.dim() == 0:
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
    following = _following(statistic, statistics)
    inverse = any(packet(node) in (aten.rsqrt, aten.reciprocal) for node in following)
    return inverse or any(packet(u) is aten.div and u.args[1] is node for node in following for u in node.users)


def _following(statistic: fx.Node, statistics: Collection[fx.Node]) -> set[fx.Node]:
    """Return a statistic and those that are computed from it."""
    found, left = set(), [statistic]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [user for user in node.users if user in statistics]
    return found


def _in_its_own_shape(node: Any) -> Any:
    """Return the value that a node is a view or a copy of in another shape."""
    while isinstance(node, fx.Node) and (packet(node) in _RESHAPING or is_view(node)):
        node = node.all_input_nodes[0]
    return node


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


def differs_within_groups(statistic: Any, value: Any) -> bool:
    """Return whether a statistic of several elements is another for some elements of a group of `value`."""
    base = base_of(value) if isinstance(value, fx.Node) else None
    while packet(statistic) is aten.expand:
        statistic = statistic.all_input_nodes[0]
    x, s = tensor_of(value) if isinstance(value, fx.Node) else None, tensor_of(statistic)
    if x is None or s is None or hint(s.numel()) == hint(x.numel()):
        return False
    # As `codes.groups_of` has it; of a view, such as heads of 64 features, what is saved may have longer rows.
    longest = LEAST_ROW if base is value else 2 * LEAST_ROW
    size = 1
    for dimension in reversed(memory_order(x) or range(x.dim())):
        place = dimension - x.dim()
        if -place <= s.dim() and hint(s.shape[place]) != 1:
            return True
        size *= hint(x.shape[dimension])
        if size >= longest:
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


def scale_back(
    graph: fx.Graph,
    results: int,
    statistics: Collection[fx.Node],
    is_rounded: Callable[[fx.Node], bool],
    is_saved_itself: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Let the backward pass read u = v·s + m in place of u, where the forward pass computes v = (u − m) / s.

    In codes of u, or of u − m, what has a small deviation s is lost beside what has a large one, if a group has both,
    and gradients are divided by s: those of a batch normalization of rows were wrong by 1.4 times their norm at 4 bits
    with deviations from .1 to 10, and by .3 from .3 to 3. Codes of v serve all of them alike, in as many bytes. What it
    reads instead, and what is computed of that without a gradient, is returned: codes of it would be those of u again
    (DeepSeek V4's gradient was 2.9 times its norm off at the default).

    Args:
        graph: of both passes.
        results: number of the forward pass's outputs.
        statistics: reductions and what is computed from them alone.
        is_rounded: whether a value would be saved in codes.
        is_saved_itself: whether a value is not to be computed again from codes.
    """
    returned: Any = graph.output_node().args[0]
    forward = ancestors(node for node in returned[:results] if isinstance(node, fx.Node))
    backward = ancestors(node for node in returned[results:] if isinstance(node, fx.Node)) - forward
    of_gradient = of_gradients(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    restored: set[fx.Node] = set()
    for node in [node for node in order if node in forward and packet(node) in (aten.div, aten.mul)]:
        if not _is_of_own_statistic(node, statistics):
            continue
        inverse = _in_its_own_shape(node.args[1])  # one by a root, as batch normalization has deviations
        if packet(node) is aten.mul and packet(inverse) not in (aten.rsqrt, aten.reciprocal):
            continue
        value: Any = node.args[0]
        if not is_rounded(value):
            continue
        # Of no gradient, as of what is detached, s may be 0 where all gradients are numbers.
        if not _is_alike(value, node) or not _meets(node.args[1], statistics, of_gradient):
            continue
        with graph.inserting_after(node):
            deviation = node.args[1]
            if packet(node) is aten.mul:
                deviation = _like(graph.call_function(aten.pow.Tensor_Scalar, (deviation, -1)), deviation)
        with graph.inserting_after(node if packet(node) is aten.div else deviation):
            again = _like(graph.call_function(aten.mul.Tensor, (node, deviation)), value)
        pairs = [(value, again)]
        is_centred = packet(value) is aten.sub and value.args[1] in statistics and not value.kwargs
        if is_centred and _is_alike(value.args[0], value):
            with graph.inserting_after(again):
                whole = _like(graph.call_function(aten.add.Tensor, (again, value.args[1])), value.args[0])
            pairs.append((value.args[0], whole))
        for read, instead in pairs:
            later = [user for user in read.users if user in backward and order.get(user, 0) > order[node]]
            for user in later:
                if not _asks_for_itself(read, user, backward - of_gradient, is_saved_itself):
                    user.replace_input_with(read, instead)
                    node.meta[_READ_INSTEAD] = True
                    restored.add(instead)
    return descendants(graph, restored.__contains__) - of_gradient


def _is_alike(node: Any, other: fx.Node) -> bool:
    """Return whether a value has the shape and dtype of another: statistics may broadcast it, or be in float32."""
    return shape_of(node) == shape_of(other) and value_of(node).dtype == value_of(other).dtype


def _meets(statistic: Any, statistics: Collection[fx.Node], of_gradient: Collection[fx.Node]) -> bool:
    """Return whether a gradient is multiplied with a statistic or its multiples, or divided by it, in any shape."""
    following = _following(_in_its_own_shape(statistic), statistics)
    return any(user in of_gradient for node in following for user in node.users)


def _asks_for_itself(
    read: fx.Node, user: fx.Node, again: Collection[fx.Node], is_saved_itself: Callable[[fx.Node], bool]
) -> bool:
    """Return whether v·s + m will not do for `user`, or what that computes `again`, in place of `read`.

    It is not u to the last digit, which comparisons with a largest element or with 0 ask for; and that it is above 0,
    as u may be, so that codes do for log(u), is not to be seen.
    """
    unknown, left, seen = Delicate({}, (), (), (), (), ()), [(read, user)], {user}
    while left:
        value, reader = left.pop()
        if is_saved_itself(reader) or unknown.is_near_pole(value, reader) or unknown.is_periodic(value, reader):
            return True
        if unknown.is_exponent(value, reader):
            return True
        following = [after for after in reader.users if reader in again and after not in seen]
        seen.update(following)
        left += [(reader, after) for after in following]
    return False


def _like(node: fx.Node, other: Any) -> fx.Node:
    """Return a new node with what is known of another one's value."""
    node.meta = {key: value for key, value in other.meta.items() if key != _READ_INSTEAD}
    return node
