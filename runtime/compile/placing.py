"""Where in a graph values are quantized and dequantized, so that the compiler fuses it with what is there."""

from collections.abc import Mapping

import torch
from torch import fx

from .nodes import is_pointwise, is_view, tensor_of


def last_use(node: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    """Return the last node that reads the value; `node` itself if only the output does.

    Through views; and a pointwise operation whose only use is another one reads it there, as compilers fuse them.
    """
    last, found = node, [(node, False)]
    while found:
        value, is_fused = found.pop()
        for user in value.users:
            if user.op == "output" or (is_fused and not _is_in_run(user)):
                continue
            last = max(last, user, key=order.__getitem__)
            if is_view(user):
                found.append((user, is_fused))
            elif is_pointwise(user) and len(user.users) == 1:
                found.append((user, True))
    return last


def after_run(node: fx.Node) -> fx.Node:
    """Return the node after `node` and the pointwise operations that follow it, with which a compiler fuses it."""
    if node.op == "placeholder":
        return operations(node.graph)
    node = node.next
    while _is_in_run(node):
        node = node.next
    return node


def _is_in_run(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_pointwise(node) or is_view(node))


def operations(graph: fx.Graph) -> fx.Node:
    """Return the first node after the placeholders, which come before all else."""
    return next(n for n in graph.nodes if n.op != "placeholder")


def start_of_run(node: fx.Node) -> fx.Node:
    """Return the first of the pointwise operations that lead up to `node`, or itself."""
    while _is_in_run(node.prev):
        node = node.prev
    return node


def some_placeholder(graph: fx.Graph, device: torch.device) -> fx.Node:
    """Return a placeholder whose value is a tensor, on the device if there is one.

    The last one: AOTAutograd's tokens of effects, such as those of a check of `cholesky`, come first and are None.
    """
    tensors = [n for n in reversed(graph.find_nodes(op="placeholder")) if tensor_of(n) is not None]
    return next((n for n in tensors if n.meta["val"].device == device), tensors[0])


def placeholder(graph: fx.Graph, part: fx.Node) -> fx.Node:
    """Return a placeholder of a backward graph that is given what the node `part` of the forward graph is."""
    node = graph.placeholder(part.name)
    node.target = node.name  # two arguments of one name would be one
    node.meta = {key: part.meta[key] for key in ("val", "tensor_meta") if key in part.meta}
    return node
