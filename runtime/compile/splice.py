"""Writes a function of tensors into a graph, at the graph's insertion point.

    with graph.inserting_before(node):
        parts = splice(graph, partial(quantize, groups=groups, bits=4, seed=None), x)

The function is ordinary torch code, traced with the values that the graph's nodes have in the compiler, sizes that are
symbols included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import _disable_current_modes


def splice(graph: fx.Graph, function: Callable[..., Any], *inputs: fx.Node) -> tuple[fx.Node, ...]:
    """Insert the operators of `function` of the values of `inputs`, and return the nodes of its results."""
    from torch._inductor.decomposition import select_decomp_table

    values = [node.meta["val"] for node in inputs]
    fake = detect_fake_mode(values)
    assert fake is not None
    with _disable_current_modes(), fake, torch.no_grad():
        traced = make_fx(function, decomposition_table=select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in traced.graph.nodes:
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
            return tuple(copies[result] for result in results)
        if node.op != "placeholder":
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            copy.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
            if isinstance(copy.meta.get("val"), torch.Tensor):
                copy.meta["tensor_meta"] = _extract_tensor_metadata(copy.meta["val"])
    raise AssertionError("a graph ends with its output")
