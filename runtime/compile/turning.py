"""Puts rotated codes between two graphs: one call for all values of a place, one key a step for all their signs.

keys = draw_keys(forward, turned, splicer)                       by device; saved in front of all else
parts = quantize_turned(forward, turned, keys, splicer)          what each value is saved as
dequantize_turned(backward, turned, keys, parts, saved, splicer)
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from .. import ops
from .cut import Choice
from .nodes import value_of
from .rotated import Rotation, dequantize, quantize
from .splice import Splicer, after_last_use, before_first_use, operations, placeholder, some_placeholder

Turned = Mapping[fx.Node, Choice]
Keys = Mapping[torch.device, fx.Node]


def draw_keys(graph: fx.Graph, turned: Turned, splicer: Splicer) -> dict[torch.device, fx.Node]:
    """Return nodes of a key, int64 (1,), for each device that has values to turn, drawn behind the placeholders."""
    found = {}
    with graph.inserting_before(operations(graph)):
        for device in dict.fromkeys(value_of(node).device for node in turned):
            draw = partial(draw_seed_on, device=device)
            (found[device],) = splicer.splice(graph, draw, some_placeholder(graph, device))
    return found


def draw_seed_on(some: Tensor, *, device: torch.device) -> Tensor:
    """Return the next seed of the stream, (1,), to round values on `device`, which no input of a graph may be on.

    Args:
        some: any tensor.
        device: of the values.
    """
    return ops.draw_seeds(some if some.device == device else some.new_empty(0, device=device), 1)


def quantize_turned(
    graph: fx.Graph, turned: Turned, keys: Keys, splicer: Splicer
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the nodes of the parts that each value is saved as, computed right after its last use."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    offsets = _offsets(turned)
    parts: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for before, nodes in _calls(turned, lambda node: after_last_use(node, order)):
        forms = tuple(map(_form, map(turned.__getitem__, nodes)))
        function = partial(quantize, forms=forms, offsets=tuple(offsets[node] for node in nodes))
        with graph.inserting_before(before):
            results = splicer.splice(graph, function, keys[value_of(nodes[0]).device], *nodes)
        means = iter(results[len(nodes) :])
        for node, form, buffer in zip(nodes, forms, results, strict=False):
            parts[node] = (buffer, next(means)) if form.centered else (buffer,)
    return parts


def dequantize_turned(
    graph: fx.Graph,
    turned: Turned,
    keys: Keys,
    parts: Mapping[fx.Node, tuple[fx.Node, ...]],
    saved: Sequence[fx.Node],
    splicer: Splicer,
) -> None:
    """Replace the placeholder of each value by those of its parts, dequantized right before its first use.

    Args:
        graph: of the backward pass.
        turned: values of the forward graph that are turned.
        keys: of `draw_keys`.
        parts: of `quantize_turned`.
        saved: all tensors that the forward graph saves, in order: the keys come before the first.
        splicer: of the compilation.
    """
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    order = {node: place for place, node in enumerate(graph.nodes)}
    offsets = _offsets(turned)
    if keys:
        with graph.inserting_before(placeholders[saved[0].name]):
            keys = {device: placeholder(graph, key) for device, key in keys.items()}

    for before, nodes in _calls(turned, lambda node: before_first_use(placeholders[node.name], order)):
        read: list[list[fx.Node]] = []
        for node in nodes:
            with graph.inserting_before(placeholders[node.name]):
                read.append([placeholder(graph, part) for part in parts[node]])
        buffers, means = [own[0] for own in read], [mean for own in read for mean in own[1:]]
        function = partial(
            dequantize,
            forms=tuple(map(_form, map(turned.__getitem__, nodes))),
            offsets=tuple(offsets[node] for node in nodes),
            dtype=value_of(nodes[0]).dtype,
        )
        with graph.inserting_before(before):
            values = splicer.splice(graph, function, keys[value_of(nodes[0]).device], *buffers, *means)
        for node, value in zip(nodes, values, strict=True):
            placeholders[node.name].replace_all_uses_with(value)
            graph.erase_node(placeholders[node.name])


def _calls(turned: Turned, place_of: Callable[[fx.Node], fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the places of calls, and the values of each: all of one place, device and dtype."""
    found: defaultdict[tuple[fx.Node, Any], list[fx.Node]] = defaultdict(list)
    for node in turned:
        x = value_of(node)
        found[place_of(node), (x.device, x.dtype)].append(node)
    return [(place, nodes) for (place, _), nodes in found.items()]


def _form(choice: Choice) -> Rotation:
    assert choice.rotation is not None
    return choice.rotation


def _offsets(turned: Turned) -> dict[fx.Node, int]:
    """Return how far from the key each value's seed is."""
    return {node: offset for offset, node in enumerate(turned)}
