"""Counts the floating-point operations of graphs: what computing attention again costs.

    share = share_of_attention_again(forward_graph, backward_graph)

Products of matrices, convolutions and attention count, as torch counts them; a causal mask halves nothing.
"""

from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from .attention import arguments_by_name, is_attention
from .codes import hint
from .nodes import packet, tensor_of

_BACKWARD = 2.5  # of attention's forward pass: scores again, and four products


def share_of_attention_again(forward: fx.Graph, backward: fx.Graph) -> float:
    """Return the operations of attention's forward passes in a backward graph, relative to all others of both graphs.

    Args:
        forward, backward: divided graphs, with values in their nodes' `meta`.
    """
    calls = (node for node in backward.nodes if node.op == "call_function" and is_attention(node))
    again = sum(_operations(node) for node in calls if "backward" not in str(node.target))
    total = sum(_operations(node) for graph in (forward, backward) for node in graph.nodes)
    return again / (total - again) if again else 0.0


def _operations(node: fx.Node) -> float:
    if node.op != "call_function":
        return 0.0
    if is_attention(node):
        read = (arguments_by_name(node).get(name) for name in ("query", "key"))
        query, key = (tensor_of(value) if isinstance(value, fx.Node) else None for value in read)
        if query is None or key is None:
            return 0.0
        forward = 4.0 * hint(query.numel()) * hint(key.shape[-2])  # two products, of two operations a term
        return forward * (_BACKWARD if "backward" in str(node.target) else 1.0)
    count = flop_registry.get(packet(node))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _shaped)
    return float(count(*args, **kwargs, out_val=_shaped(node)))


def _shaped(node: fx.Node) -> Any:
    """Return an empty tensor on the meta device of a value's sizes, which may be symbols."""
    x = node.meta.get("val")
    if isinstance(x, Tensor):
        return x.new_empty([hint(size) for size in x.shape], device="meta")
    return x
