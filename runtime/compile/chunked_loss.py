"""Losses in chunks of tokens in compiled graphs: of heads that `fewbit.convert(model, loss="chunked")` has changed.

    graph, finish = in_chunks(graph)       the graph that Dynamo captured
    outputs = finish(inputs, compiled(*inputs))    (None where it returns no logits)

Dynamo leaves a call of `linear_in_graph` for each such head. Where a cross-entropy is all that follows it, or the sum
of several, as of a head and its adapter, but for views, casts, scales and a cap, the loss becomes one operator,
`chunked_loss`, which forms the gradients in the forward pass (layers/loss_over_chunks.py); these are what it saves,
exactly. Models also return their logits: the graph returns hidden states in their place, of which `finish` makes logits
that are computed when they are read.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ..layers.deferred_logits import SUMMED_IN_FLOAT32, deferred, keeps_rows, linear_in_graph
from ..layers.loss_over_chunks import AS_IT_IS, Squash, loss_in_graph

Finish = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
# What may be done to logits before their loss, by the names of methods and functions.
_CASTS, _RESHAPES, _QUOTIENTS = ("float", "to"), ("view", "reshape", "flatten"), ("truediv", "div", "true_divide")


@dataclass(frozen=True)
class _Logits:
    """What a node's value is: the sum of the logits of heads.

    Attributes:
        heads: calls of `linear_in_graph`, and the factor of each.
        node: which has the value, before the shape of its tokens is changed.
        path: the nodes that change it.
        squash: what was done to the sum.
    """

    heads: tuple[tuple[fx.Node, float], ...]
    node: fx.Node
    path: tuple[fx.Node, ...] = ()
    squash: Squash = AS_IT_IS

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """The calls."""
        return frozenset(node for node, _ in self.heads)


def in_chunks(module: fx.GraphModule) -> tuple[fx.GraphModule, Finish | None]:
    """Change a graph in place: compute the losses of its converted heads in chunks.

    Returns:
        The graph, and what makes of its inputs and outputs those that it had before; None if it has them.
    """
    logits: dict[fx.Node, _Logits] = {}
    losses: dict[fx.Node, dict[str, Any]] = {}  # and their arguments
    for node in module.graph.nodes:
        given = [logits[a] for a in node.all_input_nodes if a in logits]
        if node.target is linear_in_graph:
            if not _changes(node):
                logits[node] = _Logits(((node, 1.0),), node)
        elif given and (after := _after(node, given)) is not None:
            logits[node] = after
        elif given and (options := _options(node)) is not None:
            losses[node] = options
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    for heads in _together(logits.values()):
        own = [node for node, found in logits.items() if found.nodes <= heads]
        ends = [loss for loss, options in losses.items() if options["input"] in own]
        read = any(user not in (*own, *ends, output) for node in own for user in node.users)
        if read or not all(_can_return(logits[node]) for node in own if output in node.users):
            losses = {loss: options for loss, options in losses.items() if loss not in ends}
            logits = {node: found for node, found in logits.items() if node not in own}
    if not logits:
        return module, None
    for loss, options in losses.items():
        _replace_loss(module.graph, loss, options, logits[options["input"]])
    returned = {node: logits[node] for node in output.all_input_nodes if node in logits}
    finish = _return_hidden(module.graph, output, returned)
    for node in reversed(logits):
        module.graph.erase_node(node)
    module.recompile()
    return module, finish


def _together(logits: Any) -> list[frozenset[fx.Node]]:
    """Return the sets of heads that are summed anywhere."""
    sets: list[frozenset[fx.Node]] = []
    for found in logits:
        met = [heads for heads in sets if heads & found.nodes]
        sets = [heads for heads in sets if heads not in met] + [found.nodes.union(*met)]
    return sets


def _example(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _changes(head: fx.Node) -> bool:
    """Return whether what a head reads may be written in place after it: where its loss is, it would be another."""
    read = [x for x in map(_example, head.all_input_nodes) if x is not None]
    written = {StorageWeakRef(x.untyped_storage()) for x in read if x._version}  # at any time
    node = head
    while written and (node := node.next).op != "output":
        read = [x for x in map(_example, node.all_input_nodes) if x is not None]
        if node.target is not linear_in_graph and any(StorageWeakRef(x.untyped_storage()) in written for x in read):
            return True
    return False


def _after(node: fx.Node, given: Sequence[_Logits]) -> _Logits | None:
    """Return what a node makes of logits; None if it is none of what can be done in chunks."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    first, result = given[0], _example(node)
    x = _example(first.path[-1] if first.path else first.node)
    if x is None or result is None:
        return None
    if name in ("add", "iadd"):
        return _sum(node, given) if len(node.args) == 2 and not node.kwargs else None
    if sum(a is not None for a in map(_example, node.all_input_nodes)) > 1:
        return None
    # A change of shape is applied to hidden states; anything else is done to the value as it is.
    same = first if first.path else replace(first, node=node)
    if name in _CASTS:
        both = {x.dtype, result.dtype} <= {*SUMMED_IN_FLOAT32}
        return same if (both or x.dtype == result.dtype) and x.device == result.device else None
    if name == "contiguous":
        return same
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(part is ... or isinstance(part, int | slice) for part in index)
        return replace(first, path=(*first.path, node)) if plain and keeps_rows(index, x.dim()) else None
    if name in _RESHAPES:
        is_rows = result.dim() == 2 and result.shape[1] == x.shape[-1]
        return replace(first, path=(*first.path, node)) if is_rows else None
    if name == "tanh":
        return None if first.squash.tanh else replace(same, squash=replace(first.squash, tanh=True))
    if name in ("mul", *_QUOTIENTS) and len(node.args) == 2 and not node.kwargs:
        is_first = isinstance(node.args[0], fx.Node)
        factor = node.args[1] if is_first else node.args[0]
        if type(factor) not in (int, float) or (name in _QUOTIENTS and (not factor or not is_first)):
            return None
        by = 1 / float(factor) if name in _QUOTIENTS else float(factor)  # pyright: ignore[reportArgumentType]
        return replace(same, squash=first.squash.times(by))
    return None


def _sum(node: fx.Node, given: Sequence[_Logits]) -> _Logits | None:
    """Return the sum of the logits of two heads, as of a layer and its adapter."""
    x, y = _example(node.args[0]), _example(node.args[1])
    if x is None or y is None or len(given) != 2 or x.shape != y.shape:
        return None
    if any(logits.path or logits.squash.tanh for logits in given):
        return None
    if node.target is operator.iadd:
        changed: Any = node.args[0]
        if changed.target not in (linear_in_graph, operator.add, operator.iadd) or len(changed.users) > 1:
            return None  # what else sees the first sees the sum
    heads = [(head, factor * each.squash.before) for each in given for head, factor in each.heads]
    return _Logits((*heads,), node) if len({head for head, _ in heads}) == len(heads) else None


def _options(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a cross-entropy that can be computed in chunks."""
    if node.target is not F.cross_entropy:
        return None
    bound = inspect.signature(F.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x, target = _example(given["input"]), _example(given["target"])
    if x is None or target is None or target.dtype != torch.int64 or x.dim() != 2 or target.shape != x.shape[:1]:
        return None
    is_plain = all(given[name] is None for name in ("weight", "size_average", "reduce"))
    return given if is_plain and given["reduction"] in ("mean", "sum") else None


def _hidden_of(graph: fx.Graph, head: fx.Node, path: Sequence[fx.Node]) -> fx.Node:
    """Add to a graph the hidden states of logits, in the shape of their tokens."""
    hidden, weight, *_ = head.args
    assert isinstance(hidden, fx.Node) and isinstance(weight, fx.Node)
    features = weight.meta["example_value"].shape[1]
    for node in path:
        if node.target is operator.getitem:
            hidden = graph.call_function(operator.getitem, (hidden, node.args[1]))
        else:
            hidden = graph.call_method("reshape", (hidden, -1, features))
    return hidden


def _replace_loss(graph: fx.Graph, loss: fx.Node, options: Mapping[str, Any], given: _Logits) -> None:
    result = _example(loss)
    assert result is not None
    sizes: list[Any] = [head.args[3] for head, _ in given.heads if head.args[3] is not None]
    names = ("ignore_index", "reduction", "label_smoothing")
    chosen = (*(options[name] for name in names), 0.0, astuple(given.squash), min(sizes, default=None))
    products = tuple((head.meta["example_value"].dtype, factor) for head, factor in given.heads)
    with graph.inserting_before(loss):
        each = ((_hidden_of(graph, head, given.path), *head.args[1:3]) for head, _ in given.heads)
        tensors = [t for of_head in each for t in of_head]
        chunked = graph.call_function(loss_in_graph, (options["target"], chosen, products, result.dtype, *tensors))
    chunked.meta = dict(loss.meta)
    loss.replace_all_uses_with(chunked)
    graph.erase_node(loss)


def _can_return(given: _Logits) -> bool:
    """Return whether a graph may return logits without values: sums of heads whose weights it is given."""
    others = [a for head, _ in given.heads for a in head.args[1:3] if a is not None]
    is_sum = not given.path and given.squash == AS_IT_IS
    return is_sum and all(isinstance(a, fx.Node) and a.op == "placeholder" for a in others)


@dataclass(frozen=True)
class _Returned:
    """A head of logits that a graph returns.

    Attributes:
        hidden: which of the graph's results its hidden states are.
        weight, bias: which of its inputs these are; None without a bias.
        dtype: in which it multiplies.
        factor: of its logits.
        chunk_size: as for `chunked_cross_entropy`.
    """

    hidden: int
    weight: int
    bias: int | None
    dtype: torch.dtype
    factor: float
    chunk_size: int | None

    def logits(self, inputs: Sequence[Any], results: Sequence[Any]) -> Tensor:
        """Return them, without values."""
        bias = None if self.bias is None else inputs[self.bias]
        x = deferred((results[self.hidden], inputs[self.weight], bias), self.dtype, self.chunk_size)
        return x if self.factor == 1 else x * self.factor


def _return_hidden(graph: fx.Graph, output: fx.Node, returned: Mapping[fx.Node, _Logits]) -> Finish | None:
    """Let a graph return hidden states in place of logits; return what makes logits of them."""
    if not returned:
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    before: Any = output.args[0]
    results, count = [*before], len(before)
    found: dict[int, tuple[tuple[_Returned, ...], torch.dtype]] = {}
    for i, node in enumerate(results[:count]):
        if node not in returned:
            continue
        heads = []
        for number, (head, factor) in enumerate(returned[node].heads):
            own: Any = head.args
            hidden, weight, bias, chunk_size = own
            place = i if number == 0 else len(results)
            results[place : place + 1] = [hidden]
            where = (inputs.index(weight), None if bias is None else inputs.index(bias))
            heads.append(_Returned(place, *where, head.meta["example_value"].dtype, factor, chunk_size))
        found[i] = (*heads,), node.meta["example_value"].dtype
    output.args = (type(before)(results),)

    def finish(inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        made = list(results)
        for i, (heads, dtype) in found.items():
            made[i] = reduce(operator.add, (head.logits(inputs, results) for head in heads)).to(dtype)
        return made[:count]

    return finish
