"""Writes functions of tensors into a graph, and says where values are quantized and dequantized in it.

    splicer = Splicer()
    with graph.inserting_before(node):
        parts = splicer.splice(graph, partial(quantize, groups=groups, bits=4), x)

A function is ordinary torch code, traced with the values that the graph's nodes have in the compiler, sizes that are
symbols included. `after_last_use` and `before_first_use` are places at which the compiler fuses it with what is there.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import _disable_current_modes

from .nodes import is_pointwise, is_view, tensor_of

_PLACE = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")  # of code and module, by which bits are given


class Splicer:
    """Inserts functions into graphs of one compilation; one that is inserted again is traced once."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, fx.GraphModule] = {}

    def splice(self, graph: fx.Graph, function: "partial[Any]", *inputs: fx.Node) -> tuple[fx.Node, ...]:
        """Insert the operators of `function` of the values of `inputs`, and return the nodes of its results.

        They stand in the place, of code and modules, of the first input.

        Args:
            graph: the graph of `inputs`.
            function: a function of tensors with hashable keyword arguments; it returns a tensor or a tuple of them.
            inputs: nodes whose values are tensors.
        """
        values = [node.meta["val"] for node in inputs]
        # What a trace depends on; of symbols, their names.
        forms = ((tuple(map(str, x.shape)), tuple(map(str, x.stride())), x.dtype, x.device) for x in values)
        key = (function.func, tuple(sorted(function.keywords.items())), *forms)
        if key not in self._traced:
            self._traced[key] = _traced(function, values)
        traced = self._traced[key]
        copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        place = {key: inputs[0].meta[key] for key in _PLACE if key in inputs[0].meta}
        for node in traced.graph.nodes:
            if node.op == "output":
                results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                return tuple(copies[result] for result in results)
            if node.op != "placeholder":
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
                copy.meta = place | {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
        raise AssertionError("a graph ends with its output")


def _traced(function: Callable[..., Any], values: list[Tensor]) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    fake = detect_fake_mode(values)
    assert fake is not None
    with _disable_current_modes(), fake, torch.no_grad():
        # Nodes that an earlier trace gave their values may share them, and tracing would take them for one.
        distinct = [value.detach() for value in values]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*distinct)
    traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(node.meta["val"])
    return traced


# ---- where -----------------------------------------------------------------------------------------------------------


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
