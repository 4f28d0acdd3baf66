"""Values that meet a gradient without a mean over rows, in codes of what is left of them without theirs.

    sums, more = center(joint_graph, saved)      after the graph was divided once: what was saved in codes then

Where u − mean(u) is taken over rows, as in a batch normalization or the covariance of features, the gradient of u has
no mean over rows. Of what meets it next, an activation's derivative or the other operand of a product of matrices, only
that counts which differs between the rows. A code errs by a share of what differs within a row; of rows that hardly
differ little is left: at 4 bits the gradient of a linear layer before a batch normalization was .49 of its norm off
where its inputs differed by a hundredth. So x − m is saved in codes, and m, and the backward pass computes from their
sum what it would from codes of x. Of a column whose rows differ by less than half its mean m is that mean, else it is
0: what a ReLU leaves keeps its zeros, and one large row, as of a sentinel among the data, no mean that others lack
(errors of .02 and .005 were .07 and 18,727). Tables hold what they are of in levels that codes of groups would blur.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .codes import hint
from .cut import SATURATED, choice_of, nbytes_of
from .delicate import SCALING
from .levelling import differs_within_groups
from .nodes import base_of, is_floating, is_pointwise, is_view, of_gradients, packet, shape_of, tensor_of, value_of
from .roles import is_saved_itself, levelled, statistics_of
from .splice import Splicer

aten = torch.ops.aten

Rows = frozenset[int]  # the dimensions that a mean is taken over

_ALIKE = 4.0  # a mean is taken out whose square is that many times the variance
_SHARE = 4  # and only if all of them take at most a quarter of the codes
_VIEWS = {aten.view, aten._unsafe_view, aten.reshape}
_CONTRACTED = {aten.mm: (1, 0), aten.bmm: (2, 1)}


def center(graph: fx.Graph, saved: Collection[str]) -> tuple[set[fx.Node], int]:
    """Let the backward pass read x − m, plus m, in place of some values x; return these sums, and the bytes of all m.

    Args:
        graph: of both passes.
        saved: names of the values that are saved in codes.
    """
    of_gradient, apart = of_gradients(graph), levelled(graph, statistics_of(graph))
    found: dict[fx.Node, Rows] = {}
    for value, rows in _met(graph, of_gradient):
        for x, of_x in _behind(value, rows, saved):
            # What is levelled has no mean, as a normalized input.
            if x not in apart and packet(x) not in SATURATED:
                found.setdefault(x, of_x)
    sums, nbytes, splicer = set[fx.Node](), 0, Splicer()
    for x, rows in found.items():
        choice, number = choice_of(x), 1
        for dimension in rows:
            number *= hint(value_of(x).shape[dimension])
        means = nbytes_of(x) // max(number, 1)
        if choice is not None and _SHARE * means <= choice.nbytes:
            sums.add(_centered(x, rows, of_gradient, saved, splicer))
            nbytes += means
    graph.eliminate_dead_code()
    return sums, nbytes


def _behind(value: fx.Node, rows: Rows, saved: Collection[str]) -> Iterator[tuple[fx.Node, Rows]]:
    """Yield what is saved of that which a value is computed from element by element, and the rows' dimensions there."""
    left, seen = [(value, rows)], {value}
    while left:
        node, own = left.pop()
        if node.name in saved:
            yield node, own
        elif packet(node) in _VIEWS or packet(node) is aten.permute:
            left += [(node.all_input_nodes[0], before)] if (before := _before(node, own)) else []
        elif is_pointwise(node) and not is_saved_itself(node):
            inner = [i for i in node.all_input_nodes if i not in seen and shape_of(i) == shape_of(node)]
            seen.update(inner)
            left += [(i, own) for i in inner]


def _centered(
    x: fx.Node, rows: Rows, of_gradient: Collection[fx.Node], saved: Collection[str], splicer: Splicer
) -> fx.Node:
    """Return the sum that the backward pass now reads in place of a value."""
    graph, known = x.graph, set(x.graph.nodes)
    with graph.inserting_before(x.next):
        left, mean = splicer.splice(graph, partial(_apart, rows=tuple(sorted(rows))), x)
        (again,) = splicer.splice(graph, partial(torch.add), left, mean)
    mean.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # and not what it is chosen of
    instead = {x: again}
    for node in [node for node in graph.nodes if node in known]:
        if node in of_gradient or not any(i in instead for i in node.all_input_nodes):
            continue
        is_again = is_floating(node) and (is_pointwise(node) or is_view(node)) and not is_saved_itself(node)
        if is_again and node.name not in saved:
            with graph.inserting_after(node):
                instead[node] = graph.node_copy(node, lambda i: instead.get(i, i))
            instead[node].meta = dict(node.meta)
    for read, other in instead.items():
        for user in list(read.users):
            if user in of_gradient:
                user.replace_input_with(read, other)
    return again


def _apart(x: Tensor, *, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return what is left of a value without its mean, and the mean, which is 0 where it is small or no number."""
    variance, mean = torch.var_mean(x, rows, correction=0, keepdim=True)
    mean = torch.where(mean * mean > _ALIKE * variance, mean, 0)
    return x - mean, mean


# ---- gradients without a mean over rows ------------------------------------------------------------------------------


def _met(graph: fx.Graph, of_gradient: Collection[fx.Node]) -> Iterator[tuple[fx.Node, Rows]]:
    """Yield the values that gradients without a mean over rows meet first, and the rows' dimensions of them."""
    without: dict[fx.Node, Rows] = {}
    for node in graph.nodes:
        if node not in of_gradient or node.op != "call_function" or tensor_of(node) is None:
            continue
        rows = _rows_less_mean(node, of_gradient) or _rows_through(node, without, of_gradient)
        if rows:
            without[node] = rows
        for value, met in _partners(node, without, of_gradient):
            while packet(value) in _VIEWS or packet(value) is aten.permute:
                met = _before(value, met)
                value = value.all_input_nodes[0]
            if met:
                yield value, met


def _rows_less_mean(node: fx.Node, of_gradient: Collection[fx.Node]) -> Rows:
    """Return the dimensions of which a gradient is less its mean: none if it is no such difference."""
    terms = node.args[:2]
    if packet(node) not in (aten.add, aten.sub) or not all(isinstance(t, fx.Node) and t in of_gradient for t in terms):
        return Rows()
    for term in terms:
        mean = _unscaled(term, {aten.expand})
        x, s = value_of(node), tensor_of(mean)
        if s is None or s.dim() != x.dim() or not differs_within_groups(mean, node):
            continue
        reduced = _unscaled(mean, {aten.view, aten.squeeze, aten.unsqueeze})
        if packet(reduced) in (aten.sum, aten.mean) and reduced in of_gradient:
            return Rows(d for d in range(x.dim()) if hint(s.shape[d]) == 1 != hint(x.shape[d]))
    return Rows()


def _unscaled(node: Any, through: Collection[Any]) -> fx.Node:
    """Return the value that a node is a multiple of, also in other shapes by these operators."""
    while packet(node) in through or packet(node) in SCALING:
        tensors = [i for i in node.all_input_nodes if tensor_of(i) is not None]
        if len(tensors) > 1:
            break
        node = tensors[0]
    return node


def _rows_through(node: fx.Node, without: Mapping[fx.Node, Rows], of_gradient: Collection[fx.Node]) -> Rows:
    """Return the dimensions of which a gradient has no mean as those that it is computed from have none.

    A product with what differs between rows leaves it one, a small one where they hardly differ. Behind a layer's
    weights another layer begins.
    """
    gradients = [i for i in node.all_input_nodes if i in of_gradient]
    first = gradients[0]
    rows = without.get(first, Rows())
    if packet(node) in _VIEWS or packet(node) is aten.permute:
        return _after(node, rows)
    is_of_values = all(base_of(i).op == "call_function" for i in node.all_input_nodes)
    if packet(node) in _CONTRACTED and len(gradients) == 1 and is_of_values:
        place = node.args.index(first)
        kept = len(shape_of(node) or ()) - 2 + place  # the rows of the first factor, the columns of the second
        return rows & {kept} if len(rows) == 1 else Rows()
    if not is_pointwise(node) or shape_of(first) != shape_of(node):
        return Rows()
    return rows if all(without.get(gradient) == rows for gradient in gradients) else Rows()


def _partners(
    node: fx.Node, without: Mapping[fx.Node, Rows], of_gradient: Collection[fx.Node]
) -> list[tuple[fx.Node, Rows]]:
    """Return what a gradient without a mean is multiplied with, if it is one of two factors, and the rows there."""
    if len(node.args) < 2 or packet(node) not in (aten.mul, *_CONTRACTED):
        return []
    found = []
    for place in (0, 1):
        gradient, value = node.args[place], node.args[1 - place]
        if not isinstance(gradient, fx.Node) or not isinstance(value, fx.Node) or value in of_gradient:
            continue
        rows = without.get(gradient, Rows())
        if packet(node) is aten.mul:
            found += [(value, rows)] if rows and shape_of(value) == shape_of(node) else []
        elif _CONTRACTED[packet(node)][place] in rows:
            found.append((value, Rows({_CONTRACTED[packet(node)][1 - place]})))
    return found


def _after(view: fx.Node, rows: Rows) -> Rows:
    """Return the dimensions of a view that are those of what it is a view of."""
    if packet(view) is aten.permute:
        order: Any = view.args[1]
        return Rows(place for place, d in enumerate(order) if d % len(order) in rows)
    return _all_but_last(view.all_input_nodes[0], view, rows)


def _before(view: fx.Node, rows: Rows) -> Rows:
    """Return the dimensions of what a view is of that are those of the view."""
    if packet(view) is aten.permute:
        order: Any = view.args[1]
        return Rows(d % len(order) for place, d in enumerate(order) if place in rows)
    return _all_but_last(view, view.all_input_nodes[0], rows)


def _all_but_last(one: fx.Node, other: fx.Node, rows: Rows) -> Rows:
    """Return all dimensions but the last of another shape of the same features, if they are what `rows` are of one."""
    x, y = value_of(one), value_of(other)
    same = x.dim() > 1 and y.dim() > 1 and str(x.shape[-1]) == str(y.shape[-1])
    return Rows(range(y.dim() - 1)) if same and rows == Rows(range(x.dim() - 1)) else Rows()
