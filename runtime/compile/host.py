"""Codes of compiled graphs that wait in host memory, copied by torch's own operations (`torch.ops.ao`, from 2.13 on).

    forward      codes → offload, on a stream of its own → wait, before the next offload      the output is the copy
    backward     the copy → reload, once the one before is there → wait, before the first use

So two buffers are on the device at once, the one in use and the one on its way; and compression comes first, so that a
third or less of the bytes cross the bus. Moved are those that are computed first, which wait longest.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from importlib import import_module

import torch
from torch import fx

from ...tables import FewbitError
from .cut import nbytes_of, results_and_saved
from .nodes import base_of, tensor_of
from .splice import placeholder

SMALLEST = 1 << 16  # bytes: copies of less are not worth their latency, as in plans


def offload(forward: fx.GraphModule, backward: fx.GraphModule, results: int, codes: Iterable[str], most: int) -> int:
    """Let codes wait in host memory between the passes; return their bytes.

    Args:
        forward: returns `results` results, then what it saves.
        backward: has a placeholder for each saved tensor, in the same order.
        results: their number.
        codes: names of the nodes of buffers that may be moved.
        most: bytes.

    Raises:
        FewbitError: this torch cannot.
    """
    chosen = _choose(forward.graph, results, {*codes}, most)
    if not chosen:
        return 0
    check_torch()
    from torch._functorch._activation_offloading.activation_offloading import offload_chosen_sets_async

    reads = _reads(forward.graph, backward.graph, results)
    for i, node in enumerate(chosen):
        owned, read = _owned(node, reads[node])
        # Torch finds the two ends by their name, of which the backward graph may have had a node of its own.
        owned._rename(f"waiting_{i}")
        read._rename(owned.name)
        read.target = read.name
        owned.meta["saved_for_offloading"] = True
    offload_chosen_sets_async(forward, backward)
    _two_at_once(forward.graph, "offload")
    _two_at_once(backward.graph, "reload")
    return sum(map(nbytes_of, chosen))


def check_torch() -> None:
    """Raise FewbitError if this torch cannot copy what a compiled graph saves."""
    try:
        import_module("torch._functorch._activation_offloading.offload_ops")
    except ImportError as error:
        needed = "host_memory needs torch 2.13, which has copies to host memory for compiled graphs"
        raise FewbitError(needed) from error


def _choose(graph: fx.Graph, results: int, codes: set[str], most: int) -> list[fx.Node]:
    """Return the nodes of codes that own their memory on a device, the first computed first, of `most` bytes in all."""
    outputs, saved = results_and_saved(graph, results)
    bases = Counter(base_of(node) for node in (*outputs, *saved) if isinstance(node, fx.Node))
    order = {node: i for i, node in enumerate(graph.nodes)}
    chosen: list[fx.Node] = []
    for node in sorted((node for node in saved if isinstance(node, fx.Node)), key=order.__getitem__):
        x = tensor_of(node)
        if node.name not in codes or x is None or not is_on_device(node) or bases[base_of(node)] > 1:
            continue
        # As torch says: views and memory with gaps are not moved.
        moves = node is base_of(node) and node.op == "call_function" and x.is_contiguous()
        if moves and SMALLEST <= nbytes_of(node) <= most:
            most -= nbytes_of(node)
            chosen.append(node)
    return chosen


def _reads(forward: fx.Graph, backward: fx.Graph, results: int) -> dict[fx.Node, fx.Node]:
    """Return the placeholder of each saved tensor; those of sizes come first."""
    _, saved = results_and_saved(forward, results)
    placeholders = (node for node in backward.find_nodes(op="placeholder") if tensor_of(node) is not None)
    return dict(zip((node for node in saved if tensor_of(node) is not None), placeholders, strict=False))


def _owned(node: fx.Node, read: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return a node to save in place of one of several results of an operator, which torch must not move: a copy, and
    its placeholder."""
    if node.target is not operator.getitem:
        return node, read
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    node.graph.output_node().replace_input_with(node, copy)
    with read.graph.inserting_before(read):
        own = placeholder(read.graph, copy)
    read.replace_all_uses_with(own)
    read.graph.erase_node(read)
    return copy, own


def is_on_device(node: fx.Node) -> bool:
    """Return whether a node's value is not in host memory anyway."""
    return node.meta["val"].device.type != "cpu"


def _two_at_once(graph: fx.Graph, kind: str) -> None:
    """Let each copy begin when the one before has ended, and the computation wait for it where it must: an offload
    before the next begins, a reload before it is read."""
    copies = [node for node in graph.nodes if str(node.target).startswith(f"ao.{kind}")]
    waits = [next(user for user in copy.users if str(user.target).startswith("ao.wait_tensor")) for copy in copies]
    for i, copy in enumerate(copies[1:]):
        if kind == "offload":
            copy.prepend(waits[i])
        else:
            waits[i].append(copy)
