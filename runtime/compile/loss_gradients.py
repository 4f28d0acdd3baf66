"""Gradients of a loss that are small beside the values they are computed from, in codes of their own.

    set_apart(joint_graph, smallest=4096)     where the backward pass read ∂loss/∂x · t, it reads a marked value times t

The gradient of a cosine, or of a divergence from soft targets, is a difference of values that become equal as the loss
is minimized: codes err by a share of the values, and at the end of training by several times their difference. A joint
graph is linear in its one tangent t, the gradient of the loss. So the operators from t to the first product of matrices
are computed with 1 in its place, which needs no tangent: in the forward pass, from exact values. What is left behind
them is saved in codes that err by a share of itself. All other gradients inherit that error, so these codes have as
many bits, up to 8, as there is room for in the bytes that were saved otherwise (`cut.widen`). A difference from labels,
as of a cross entropy, is none of equal values, and stays as it is: the probability of a label has codes of its own
(fading.py, sums.py).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import inductor_prims

from .codes import hint
from .nodes import (
    SAME,
    SPLITS,
    ancestors,
    descendants,
    is_floating,
    is_floating_input,
    is_pointwise,
    is_view,
    of_gradients,
    packet,
    packet_of,
    tensor_of,
    value_of,
)

aten, prims = torch.ops.aten, torch.ops.prims

_TAG = "partitioner_tag"  # by which torch knows what was traced as backward pass
APART = "fewbit apart"  # the mark of a value that is saved, and not computed from what is rounded

_DTYPES = {torch.float32, torch.bfloat16, torch.float64}  # others lose to underflow what the tangent's scale would save

_OVERLAP = 1.5  # at twice what is there, eight crops of DINO in pairs erred by .069 beside .019 without codes of parts

_SUMS = {aten.add, aten.sub}
_FMA = packet_of(getattr(inductor_prims, "fma", None))  # a·b + c, as a softmax's gradient is written
_OF_ROWS = {aten.sum, aten.mean, aten.var, aten.var_mean, aten.std, aten.linalg_vector_norm, aten.logsumexp}
# Linear in their first argument, whatever the others are; of two tensors, see `_is_linear`.
_OF_FIRST = {aten.neg, aten.expand, aten.sum, aten.mean, aten.div, aten.cumsum, aten.flip, aten.gather, *SAME}
_OF_FIRST |= {aten.index, aten.constant_pad_nd, prims.rev, aten.repeat}
_INTO_ZEROS = {aten.slice_scatter: 1, aten.select_scatter: 1, aten.index_put: 2, aten.scatter_add: 3}
_JOINS = {aten.cat, aten.constant_pad_nd, *_INTO_ZEROS} - {aten.scatter_add}  # which chooses a number of each row


def set_apart(graph: fx.Graph, smallest: int) -> list[fx.Node]:
    """Write gradients of a loss that are differences as multiples of what is computed without its tangent, and mark it.

    Args:
        graph: of both passes; it is changed where one of its tangents is a number, and none of float16: a loss of
            float16 is scaled so that its gradients are not lost, and the scale is in the tangent.
        smallest: elements of a gradient that is worth a code. Smaller ones are computed so beside a larger one.

    Returns: what was marked.
    """
    found: list[fx.Node] = []
    for tangent in graph.find_nodes(op="placeholder"):
        x = tensor_of(tangent)
        if "tangents" in str(tangent.target) and x is not None and x.dim() == 0 and x.dtype in _DTYPES:
            zone, varying = _linear_in(graph, tangent)
            ends = _differences(graph, zone, varying, smallest)
            copies = _without_tangent(graph, tangent, zone, ends)
            for end in ends:
                _read_multiple(end, copies[end], tangent)
                found.append(copies[end])
    return found


def _linear_in(graph: fx.Graph, tangent: fx.Node) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """Return what is linear in a tangent, in the graph's order, and what varies by element.

    That is a value of which each element is computed from another floating-point number of the inputs. Labels are
    integers, and what rows are weighted by is one number for many elements.
    """
    of_gradient, floating = of_gradients(graph), descendants(graph, is_floating_input)
    zone, varying = {tangent: None}, set[fx.Node]()
    for node in graph.nodes:
        if node in of_gradient and _is_linear(node, zone, of_gradient):
            zone[node] = None
        if node not in floating or not (is_floating(node) or packet(node) in SPLITS):
            continue
        is_of_elements = node in zone or is_pointwise(node) or is_view(node)
        if not is_of_elements or any(i in varying and _size(i) >= _size(node) for i in node.all_input_nodes):
            varying.add(node)
    return zone, varying


def _differences(
    graph: fx.Graph, zone: Mapping[fx.Node, None], varying: Collection[fx.Node], smallest: int
) -> list[fx.Node]:
    """Return the values of the zone that others read and that are differences, and the small ones beside them.

    Of what is joined of gradients of parts each part is one, and each that is read apart: in codes of all together the
    smallest would be lost, such as those of a head whose loss has the weight of a thousandth (its gradients were off by
    5.8 of their norm).
    """
    reduced, parts = _reduced(graph, zone), _parts(zone)
    others = [node for node in zone if any(user not in zone for user in node.users)]
    read = dict.fromkeys(part for node in others for part in parts.get(node, (_unviewed(node, zone),)))
    found = {node for node in read if _size(node) >= smallest and _is_difference(node, zone, varying, reduced)}
    found |= {node for node in read if found and _size(node) < smallest}
    return [node for node in zone if node in found and node.op != "placeholder"]


def _parts(zone: Mapping[fx.Node, None]) -> dict[fx.Node, dict[fx.Node, None]]:
    """Return for each value that is joined of gradients of parts, each in a place of its own, what those are.

    Where they overlap by much, as crops do that are compared with several others each, they would share too few bits.
    """
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    whole: dict[fx.Node, int] = {}
    for node in zone:
        inner = [i for i in node.all_input_nodes if i in zone]
        shows = is_view(node) or packet(node) in _SUMS or packet(node) in SAME
        if packet(node) in _JOINS or (shows and any(i in found for i in inner)):
            found[node] = {part: None for i in inner for part in found.get(i, (_unviewed(i, zone),))}
            whole[node] = max(_size(node), *(whole.get(i, 0) for i in inner))
    return {node: parts for node, parts in found.items() if sum(map(_size, parts)) <= _OVERLAP * whole[node]}


def _is_linear(node: fx.Node, zone: Collection[fx.Node], of_gradient: Collection[fx.Node]) -> bool:
    """Return whether a value is linear in those of the zone, and computed from nothing else of a gradient."""
    name, x = packet(node), tensor_of(node)
    gradients = [i for i in node.all_input_nodes if i in of_gradient]
    if x is None or x.dtype not in _DTYPES or not all(g in zone for g in gradients):
        return False
    if node.kwargs.get("rounding_mode") is not None:
        return False
    if name is aten.mul:
        return len(gradients) == 1 and node.args[0] is not node.args[1]
    if name is _FMA or name in _SUMS:
        terms = _terms(node)
        return all(sum(i in zone for i in term) == 1 for term in terms)
    if name is aten.where:
        return node.args[0] not in of_gradient and all(b in zone or _is_zero(b) for b in node.args[1:])
    if name is aten.cat:
        return all(part in zone or _is_zero(part) for part in node.args[0])  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    if name in _INTO_ZEROS:
        return _is_zero(node.args[0]) and gradients == [node.args[_INTO_ZEROS[name]]]
    if name is aten.constant_pad_nd and node.args[2:] not in ((), (0,), (0.0,)):
        return False
    return (name in _OF_FIRST or is_view(node)) and gradients == [node.args[0]]


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return packet(value) in (aten.full, aten.full_like, aten.scalar_tensor) and bool(value.args[-1] == 0)
    return isinstance(value, int | float) and value == 0


def _unviewed(node: fx.Node, zone: Collection[fx.Node]) -> fx.Node:
    """Return the value of the zone that a view shows all of, or a broadcast one."""
    while is_view(node) and (source := node.all_input_nodes[0]) in zone and _size(source) <= _size(node):
        node = source
    return node


# ---- differences -----------------------------------------------------------------------------------------------------


def _is_difference(
    end: fx.Node, zone: Collection[fx.Node], varying: Collection[fx.Node], reduced: Collection[fx.Node]
) -> bool:
    """Return whether a gradient is computed from a sum of terms that vary by element, one of them by a sum over rows.

    So softmaxes, norms and overlaps take from each gradient what it has in common with others. A sum of what two uses
    of a value give to its gradient, as the derivative of a product is, cancels by chance alone, and a bell's is so
    uneven that codes of 4 bits erred by .31 in it, and by less than .2 in what it is computed from. Of a gradient less
    its mean, or less what a maximum takes, codes have a mean again, and of it before that they are as coarse as the
    mean: where what it meets next hardly differs between rows (centering.py) it was off by up to 6 of its norm.
    """
    left, seen, is_difference = [end], {end}, False
    while left:
        node = left.pop()
        terms = [[i for i in term if i in varying and _size(i) >= _size(node)] for term in _terms(node)]
        if _terms(node) != [[]] and not all(terms):
            return False
        is_difference |= all(terms) and any(i in reduced for term in terms for i in term)
        inner = [i for i in node.all_input_nodes if i in zone and i not in seen]
        seen.update(inner)
        left += inner
    return is_difference


def _terms(node: fx.Node) -> list[list[fx.Node]]:
    """Return the values of each of the two terms that a value is the sum of; one of none if it is no sum."""
    terms = (node.args[:2], node.args[2:]) if packet(node) is _FMA else [(term,) for term in node.args]
    is_sum = packet(node) is _FMA or packet(node) in _SUMS
    return [[i for i in term if isinstance(i, fx.Node)] for term in terms] if is_sum else [[]]


def _reduced(graph: fx.Graph, zone: Collection[fx.Node]) -> set[fx.Node]:
    """Return what is computed of sums over rows element by element."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_of_elements = node in zone or is_pointwise(node) or is_view(node)
        if packet(node) in _OF_ROWS or (is_of_elements and any(i in found for i in node.all_input_nodes)):
            found.add(node)
    return found


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else (value,)
    return sum(hint(x.numel()) for x in parts if isinstance(x, torch.Tensor))


# ---- 1 in place of the tangent ---------------------------------------------------------------------------------------


def _without_tangent(
    graph: fx.Graph, tangent: fx.Node, zone: Mapping[fx.Node, None], ends: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return copies of some values of the zone, and of what they are computed from, with 1 in place of the tangent."""
    needed = ancestors(ends)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in zone if node in needed]:
        with graph.inserting_before(node.next):
            if node is tangent:
                like = {"dtype": value_of(node).dtype, "device": value_of(node).device}
                copies[node] = graph.call_function(aten.full.default, ([], 1.0), like)
            else:
                copies[node] = graph.node_copy(node, lambda i: copies.get(i, i))
            copies[node].meta = {key: value for key, value in node.meta.items() if key != _TAG}
    for end in ends:
        if is_view(end):  # a part: its memory is to be its own
            with graph.inserting_before(copies[end].next):
                part = graph.call_function(aten.clone.default, (copies[end],))
            part.meta = {**copies[end].meta, "val": value_of(end).clone()}
            copies[end] = part
    return copies


def _read_multiple(end: fx.Node, without: fx.Node, tangent: fx.Node) -> None:
    """Let all that reads a gradient read the tangent times what it is for a tangent of 1, which is marked."""
    users, fake = list(end.users), detect_fake_mode([value_of(tangent)])
    assert fake is not None
    without.meta[APART] = True
    with end.graph.inserting_before(without.next), fake, torch.no_grad():
        multiple = end.graph.call_function(aten.mul.Tensor, (without, tangent))
        multiple.meta = {**end.meta, "val": value_of(end) * value_of(tangent)}
    for user in users:
        user.replace_input_with(end, multiple)
