"""Where in a graph values are quantized and dequantized, so that the compiler fuses it with what is there."""

from collections.abc import Mapping

import torch
from torch import fx

from .nodes import is_pointwise, is_view, tensor_of


def after_last_use(node: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    """Return the node before which a value is quantized: behind the kernel that reads it last.

    A value is read through views, too; and a pointwise operation whose only use is another one reads it there, as
    compilers fuse them. Pointwise operations that follow are in that kernel. What only the output reads is quantized
    behind its own kernel. `order` has the places of the graph's nodes.
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
    if last.op == "placeholder":
        return operations(last.graph)
    last = last.next
    while _is_in_run(last):
        last = last.next
    return last


def before_first_use(node: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    """Return the node before which a value is dequantized: the first one of the kernel that reads it first."""
    first = min(node.users, key=order.__getitem__)
    while _is_in_run(first.prev):
        first = first.prev
    return first


def _is_in_run(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_pointwise(node) or is_view(node))


def operations(graph: fx.Graph) -> fx.Node:
    """Return the first node after the placeholders, which come before all else."""
    return next(n for n in graph.nodes if n.op != "placeholder")


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
