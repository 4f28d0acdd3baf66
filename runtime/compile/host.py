"""Codes of compiled graphs that wait in host memory, copied by torch's own operations (`torch.ops.ao`, from 2.13 on).

    forward      codes → offload, on a stream of its own → wait, before the next offload      the output is the copy
    backward     the copy → reload, once the one before is there → wait, before the first use

So two buffers are on the device at once, the one in use and the one on its way; and compression comes first, so that a
third or less of the bytes cross the bus. Moved are those that are computed first, which wait longest.
"""

import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from ...tables import FewbitError
from .cut import nbytes_of, results_and_saved
from .nodes import base_of, tensor_of
from .placing import placeholder

SMALLEST = 1 << 16  # bytes: copies of less are not worth their latency, as in plans


def offload(forward: fx.GraphModule, backward: fx.GraphModule, results: int, codes: Iterable[str], most: int) -> int:
    """Let codes wait in host memory between the passes; return their bytes.

    Args:
        forward: returns `results` results, then what it saves.
        backward: has a placeholder of the same name for each saved tensor.
        results: their number.
        codes: names of the nodes of buffers that may be moved.
        most: bytes.

    Raises:
        FewbitError: this torch cannot.
    """
    chosen = _choose(forward.graph, results, {*codes}, most)
    if not chosen:
        return 0
    try:
        from torch._functorch._activation_offloading.activation_offloading import offload_chosen_sets_async
    except ImportError as error:
        needed = "host_memory needs torch 2.13, which has copies to host memory for compiled graphs"
        raise FewbitError(needed) from error
    for node in chosen:
        _owned(node, backward.graph).meta["saved_for_offloading"] = True
    offload_chosen_sets_async(forward, backward)
    _two_at_once(forward.graph, "offload")
    _two_at_once(backward.graph, "reload")
    return sum(map(nbytes_of, chosen))


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


def _owned(node: fx.Node, backward: fx.Graph) -> fx.Node:
    """Return a node to save in place of one of several results of an operator, which torch must not move: a copy."""
    if node.target is not operator.getitem:
        return node
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    node.graph.output_node().replace_input_with(node, copy)
    read = next(each for each in backward.find_nodes(op="placeholder") if each.name == node.name)
    with backward.inserting_before(read):
        read.replace_all_uses_with(placeholder(backward, copy))
    backward.erase_node(read)
    return copy


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
