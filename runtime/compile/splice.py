"""Writes functions of tensors into a graph, at the graph's insertion point.

    splicer = Splicer()
    with graph.inserting_before(node):
        parts = splicer.splice(graph, partial(quantize, groups=groups, bits=4), x)

A function is ordinary torch code, traced with the values that the graph's nodes have in the compiler, sizes that are
symbols included.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import _disable_current_modes


class Splicer:
    """Inserts functions into graphs of one compilation; one that is inserted again is traced once."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, fx.GraphModule] = {}

    def splice(self, graph: fx.Graph, function: "partial[Any]", *inputs: fx.Node) -> tuple[fx.Node, ...]:
        """Insert the operators of `function` of the values of `inputs`, and return the nodes of its results.

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
        for node in traced.graph.nodes:
            if node.op == "output":
                results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                return tuple(copies[result] for result in results)
            if node.op != "placeholder":
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
                copy.meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
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
