"""Attention whose probabilities sum to one in the backward pass, though queries and keys are rounded there.

    defer(joint_graph, is_rounded)     before it is divided
    expand(backward_graph)             after

Torch's operators compute probabilities again, exp(q·k − lse), from the queries and keys that were saved and the
log-sum-exp of the exact ones. Of rounded ones they do not sum to one, and the gradient of a softmax is a difference of
sums: at 2 bits (4 for queries and keys) small Llamas ended 1.1 to 1.8 above exact training in loss, and in a simulation
.05 to .14 with output and log-sum-exp computed again from the same rounded operands. Then the log-sum-exp is not saved,
and the output only where something else reads it, such as the weights of a projection.

With 8 bits for queries and keys, projections of normalized values train as they are. Queries and keys of any size may
have scores so far apart that the gradient of a softmax is next to nothing beside either of the sums whose difference it
is: it then erred by 2.5 of its norm by the 6 bits of the output alone, and by .24 if that is computed again.

Between the two calls a node of `consistent_backward` stands for both passes of attention: it depends on a gradient, so
that torch leaves it to the backward graph whole.
"""

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from .codes import hint
from .delicate import is_each
from .nodes import PRODUCTS, SAME, base_of, is_floating, is_pointwise, is_view, operator_of, packet, tensor_of
from .splice import Splicer

aten = torch.ops.aten

_OPERANDS = ("query", "key", "value")
_RESULTS = ("out", "output", "logsumexp")
_FLEX = ("query", "key", "value", "out", "logsumexp")  # of the operator that holds a graph the order is known
_FACTORS = {aten.mul, aten.div}
_LINEAR = {
    *SAME,
    *_FACTORS,
    aten.add,
    aten.sub,
    aten.neg,
    aten.where,
    aten.cat,
    aten.stack,
    aten.index,
    aten.roll,
    aten.mean,
}
_LINEAR |= {aten.native_layer_norm, aten.native_group_norm, aten.constant_pad_nd, aten.slice_scatter, aten.avg_pool2d}
_VALUES = "fewbit_forward"  # what attention's forward pass returns in the compiler


def consistent_backward(
    backward: Any, arguments: Any, keywords: Any, forward: Any, forward_arguments: Any, forward_keywords: Any
) -> Any:
    """Stand for a backward pass of attention whose output and log-sum-exp are computed again; `expand` replaces it."""
    raise NotImplementedError("expand replaces it")


def is_attention(node: fx.Node) -> bool:
    """Return whether the node is attention's forward or backward pass."""
    return re.search("attention|attn", str(node.target)) is not None or node.target is consistent_backward


def argument_names(node: fx.Node, value: fx.Node) -> set[str]:
    """Return the names by which a backward pass of attention reads a value: query, attn_mask …"""
    return {name for name, a in arguments_by_name(node).items() if a is value}


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of attention's forward or backward pass."""
    call: Any = node.args[:3] if node.target is consistent_backward else (node.target, node.args, node.kwargs)
    target, arguments, keywords = call
    return {**dict(zip(_names(target), arguments, strict=False)), **keywords}


def _names(target: Any) -> tuple[str, ...]:
    schema = getattr(target, "_schema", None)
    return _FLEX if schema is None else tuple(argument.name for argument in schema.arguments)


def defer(graph: fx.Graph, is_rounded: Callable[[fx.Node], bool]) -> None:
    """Let the backward passes of attention in a joint graph do without the output and the log-sum-exp.

    Args:
        graph: of both passes.
        is_rounded: whether queries or keys are saved in so few bits that it matters.
    """
    splicer = Splicer()
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_attention(node) or "backward" not in str(node.target):
            continue
        read = dict(zip(_names(node.target), node.args, strict=False))
        out = read.get("out", read.get("output"))
        while isinstance(out, fx.Node) and (is_view(out) or out.target in (aten.detach.default, aten.alias.default)):
            out = out.all_input_nodes[0]
        if not isinstance(out, fx.Node) or out.target is not operator.getitem:
            continue
        forward = out.all_input_nodes[0]
        if not is_attention(forward) or not any(is_rounded(read[name]) for name in _OPERANDS[:2]):  # pyright: ignore[reportArgumentType]
            continue
        if arguments_by_name(forward).get("dropout_p"):  # another forward pass would not draw the same mask
            continue
        copies = {read[name]: _apart(read[name], forward, splicer) for name in _OPERANDS}  # pyright: ignore[reportArgumentType]
        arguments = [None if name in _RESULTS else value for name, value in read.items()]
        given: Any = (node.target, (*arguments, *node.args[len(arguments) :]), node.kwargs)
        given = (*given, forward.target, forward.args, forward.kwargs)
        with graph.inserting_before(node):
            given = fx.map_arg(given, lambda operand, copies=copies: copies.get(operand, operand))
            consistent = graph.call_function(consistent_backward, given)
        consistent.meta = {**node.meta, _VALUES: forward.meta["val"]}
        node.replace_all_uses_with(consistent)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def is_projection(node: fx.Node) -> bool:
    """Return whether queries or keys are linear in results of matrix products, but for factors of a row or a feature.

    Rotary embeddings, biases, masks of dropout and normalizations are linear in this sense.
    """
    seen, left = {node}, [node]
    while left:
        value = left.pop()
        made = packet(operator_of(value))
        if value.op != "call_function" or made in PRODUCTS or made is aten.embedding:
            continue
        operands = [i for i in operator_of(value).all_input_nodes if is_floating(i)]
        if is_pointwise(value):  # others are factors, and terms, of a row or a feature
            operands = [i for i in operands if is_each(i, value)]
        if (made not in _LINEAR and not is_view(value)) or (made in _FACTORS and len(operands) > 1):
            return False
        left += [i for i in operands if i not in seen]
        seen.update(operands)
    return True


def _apart(operand: fx.Node, forward: fx.Node, splicer: Splicer) -> fx.Node:
    """Return a copy of an operand that is a part of a larger value, such as GPT-2's queries, keys and values in one.

    Each then has the bits of its role, where one memory has the most that any needs. Copied behind the forward pass.
    """
    x, whole = tensor_of(operand), tensor_of(base_of(operand))
    if x is None or whole is None or base_of(operand).op == "placeholder" or hint(whole.numel()) < 2 * hint(x.numel()):
        return operand
    views, part = [], operand  # the views behind the one that takes a part
    while (inner := tensor_of(part.all_input_nodes[0])) is not None and hint(inner.numel()) == hint(x.numel()):
        views.insert(0, part)
        part = part.all_input_nodes[0]
    strides = [hint(s) for s in part.meta["val"].stride()]
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    graph = operand.graph
    with graph.inserting_before(forward.next):
        (copy,) = splicer.splice(graph, partial(_copied, order=order), part)
        for view in views:
            copy = graph.node_copy(view, lambda n, copy=copy, view=view: copy if n is view.all_input_nodes[0] else n)
    return copy


def _copied(x: Tensor, *, order: tuple[int, ...]) -> Tensor:
    """Return a dense copy whose dimensions lie in memory as those of `x` do."""
    dense = x.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(d) for d in range(len(order))])


def expand(graph: fx.Graph) -> None:
    """Put attention's forward and backward pass in place of what `defer` left in a backward graph."""
    for node in graph.find_nodes(op="call_function", target=consistent_backward):
        backward, arguments, keywords, forward, forward_arguments, forward_keywords = node.args
        with graph.inserting_before(node):
            again = graph.call_function(forward, forward_arguments, forward_keywords)
            again.meta["val"] = values = node.meta[_VALUES]
            out, log_sum = (graph.call_function(operator.getitem, (again, i)) for i in range(2))
            out.meta["val"], log_sum.meta["val"] = values[0], values[1]
            results = {"out": out, "output": out, "logsumexp": log_sum}
            names = _names(backward)
            filled = [results.get(name, a) for name, a in zip(names, arguments, strict=False)]
            own = graph.call_function(backward, (*filled, *arguments[len(filled) :]), keywords)
        own.meta = {key: value for key, value in node.meta.items() if key != _VALUES}
        node.replace_all_uses_with(own)
        graph.erase_node(node)
