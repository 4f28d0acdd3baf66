"""Questions about the nodes of a graph that the compiler traced: values, memory, descent."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch._ops import HigherOrderOperator

aten, prims = torch.ops.aten, torch.ops.prims

# The values of the argument, perhaps in other memory or of another dtype.
SAME = (aten.clone, aten.detach, aten.alias, aten._to_copy, prims.convert_element_type)
# Products of matrices.
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten._scaled_mm}
PRODUCTS |= {aten.mv, aten.dot, aten._trilinear}
PRODUCTS |= {getattr(aten, name) for name in ("_grouped_mm", "_scaled_grouped_mm") if hasattr(aten, name)}
EXPONENTIALS = {aten.exp, aten.exp2}
# Sums of their arguments, and what has their elements in places of its own.
SUMS = {aten.add, aten.sub, aten.neg, aten.where, aten.clone, prims.convert_element_type, aten._to_copy}
SUMS |= {aten.cat, aten.slice_scatter, aten.select_scatter, aten.constant_pad_nd, aten.index, aten.gather, aten.roll}
SUMS |= {aten.index_put, aten.embedding_dense_backward, aten.slice_backward, aten.select_backward, aten.copy}
SUMS |= {prims.rev}
SPLITS = {aten.split, aten.split_with_sizes, aten.unbind, aten.chunk}


def packet_of(operator: Any) -> Any:
    """Return an operator without its overload, or the function that it is."""
    return getattr(operator, "overloadpacket", operator)


FACTORS = {aten.mul, packet_of(getattr(inductor_prims, "fma", aten.mul))}  # a·b, a·b + c


def packet(node: fx.Node) -> Any:
    """Return the operator of a node without its overload, or its function."""
    return packet_of(node.target)


def is_view(node: fx.Node) -> bool:
    """Return whether the node's value shares memory with its first argument's."""
    if node.target is operator.getitem:
        return packet(node.all_input_nodes[0]) in SPLITS
    if packet(node) in SPLITS:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or not schema.returns:
        return False
    alias, result = schema.arguments[0].alias_info, schema.returns[0].alias_info
    # Of a complex number `mul` makes the view `_conj(1j)`, whose memory is no node's.
    return alias is not None and result is not None and not alias.is_write and bool(node.all_input_nodes)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory the value of `node` lies in."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def unconverted(node: fx.Node) -> fx.Node:
    """Return the node whose values, in another dtype perhaps, those of `node` are."""
    while packet(node) in SAME:
        node = node.all_input_nodes[0]
    return node


def operator_of(node: fx.Node) -> fx.Node:
    """Return the node that computes the value: itself, or the one of whose several results it is one."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def tensor_of(node: fx.Node) -> Tensor | None:
    """Return the node's fake tensor, None if its value is not one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def value_of(node: fx.Node) -> Tensor:
    """Return the node's fake tensor, where its value is known to be one."""
    x = tensor_of(node)
    assert x is not None
    return x


def shape_of(node: fx.Node) -> tuple[str, ...] | None:
    """Return the shape of the node's tensor, in words: comparing symbols would fix sizes that vary."""
    x = tensor_of(node)
    return None if x is None else tuple(map(str, x.shape))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether the value is computed element by element."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is prims.convert_element_type.default


def holds_a_graph(node: fx.Node) -> bool:
    """Return whether the node calls a graph of its own, such as a branch, a loop or a region compiled apart."""
    return isinstance(node.target, HigherOrderOperator)


def descendants(graph: fx.Graph, is_root: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the roots and all nodes computed from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_root(node) or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def is_floating(node: fx.Node) -> bool:
    """Return whether the node's value is one floating-point tensor."""
    x = tensor_of(node)
    return x is not None and x.is_floating_point()


def is_floating_input(node: fx.Node) -> bool:
    """Return whether the node is a floating-point tensor that the graph is given."""
    return node.op in ("placeholder", "get_attr") and is_floating(node)


def of_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of a joint graph that depend on a gradient of its outputs, placeholders named `tangents…`."""
    return descendants(graph, lambda n: n.op == "placeholder" and "tangents" in str(n.target))
