"""Losses in chunks of tokens in compiled graphs: of heads that `fewbit.convert(model, loss="chunked")` has changed.

    graph, finish = in_chunks(graph)       the graph that Dynamo captured
    outputs = finish(inputs, compiled(*inputs))    (None where it returns no logits)

Dynamo leaves a call of `linear_in_graph` for each such head. Where a cross-entropy is all that follows it, but for
views, casts, scales and a cap, the loss becomes one operator, `chunked_loss`, which forms the gradients in the forward
pass (layers/chunked_loss.py); they are what the graph saves, exactly. Models also return their logits: the graph
returns hidden states in their place, of which `finish` makes logits that are computed when they are read.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..layers.chunked_loss import loss_and_gradients, save_gradients, saved_gradients, sum_dtype, without_autocast
from ..layers.deferred_logits import SUMMED_IN_FLOAT32, deferred, keeps_rows, linear_in_graph
from ..layers.loss_of_chunk import AS_IT_IS, LossOptions, Squash
from ..ops.declare import ONCE, PURE, Call, declare

Finish = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
# What may be done to logits before their loss, by the names of methods and functions.
_CASTS, _RESHAPES, _QUOTIENTS = ("float", "to"), ("view", "reshape", "flatten"), ("truediv", "div", "true_divide")


@declare(
    "chunked_loss(Tensor labels, Tensor hidden, Tensor weight, Tensor? bias, bool[3] wanted, ScalarType dtype,"
    " float before, bool tanh, float after, int ignore_index, str reduction, float label_smoothing, SymInt? chunk_size)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(*PURE, ONCE),
)
def chunked_loss(
    labels: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
    dtype: torch.dtype,
    before: float,
    tanh: bool,
    after: float,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    chunk_size: int | None,
) -> Call:
    """Return the loss, a divisor of its gradients, and these: of hidden (tokens, features), weight, bias if wanted."""
    options = LossOptions(ignore_index, reduction, label_smoothing, 0.0, Squash(before, tanh, after), chunk_size)
    tensors = (hidden, weight, bias)
    # What is summed over tokens: in float16 only after the division, which waits for the scale of a GradScaler.
    summed = sum_dtype(dtype) if dtype == torch.float16 else weight.dtype
    dtypes = (dtype, summed, sum_dtype(dtype))

    def fake() -> tuple[Tensor, ...]:
        each = zip(tensors, wanted, dtypes, strict=True)
        grads = (hidden.new_empty(0) if t is None or not want else torch.empty_like(t, dtype=d) for t, want, d in each)
        return hidden.new_empty((), dtype=sum_dtype(dtype)), labels.new_empty(()), *grads

    def run(_: Any) -> tuple[Tensor, ...]:
        loss, divisor, grads = loss_and_gradients(labels, options, [(dtype, 1.0)], wanted, tensors)
        return (
            loss,
            labels.new_ones(()) if divisor is None else divisor,
            *(hidden.new_empty(0) if g is None else g for g in grads),
        )

    return Call(fake, run)


class _ChunkedLoss(torch.autograd.Function):
    """labels, hidden states, weight, bias and further arguments of the operator -> the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        dtype: torch.dtype,
        others: tuple[Any, ...],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the loss; save the gradients of what requires one."""
        wanted = [*ctx.needs_input_grad[3:]]
        loss, divisor, *grads = chunked_loss(labels, hidden, weight, bias, wanted, dtype, *others)
        own = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
        dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        save_gradients(ctx, dtypes, divisor if dtype == torch.float16 else None, own)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients times that of the loss."""
        return None, None, None, *saved_gradients(ctx, *grads)


def _loss_in_graph(
    labels: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    *others: Any,
) -> Tensor:
    """Return the loss: what a graph calls. The dtypes are those in which the head multiplies, and of the loss."""
    with without_autocast(hidden):
        return _ChunkedLoss.apply(labels, dtypes[0], others, hidden, weight, bias).to(dtypes[1])  # pyright: ignore


# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Logits:
    """What a node's value is: logits of a head.

    Attributes:
        head: the call of `linear_in_graph`.
        path: the nodes that change the shape of the tokens.
        squash: what was done to each.
    """

    head: fx.Node
    path: tuple[fx.Node, ...] = ()
    squash: Squash = AS_IT_IS

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """The nodes of hidden states, weight and bias, and the size of a chunk."""
        hidden, weight, bias, chunk_size = self.head.args
        return hidden, weight, bias, chunk_size


def in_chunks(module: fx.GraphModule) -> tuple[fx.GraphModule, Finish | None]:
    """Change a graph in place: compute the losses of its converted heads in chunks.

    Returns:
        The graph, and what makes of its inputs and outputs those that it had before; None if it has them.
    """
    logits: dict[fx.Node, _Logits] = {}
    losses: dict[fx.Node, dict[str, Any]] = {}  # and their arguments
    for node in module.graph.nodes:
        if node.target is linear_in_graph:
            logits[node] = _Logits(node)
        elif (given := next((logits[a] for a in node.all_input_nodes if a in logits), None)) is not None:
            if (after := _after(node, given)) is not None:
                logits[node] = after
            elif (options := _options(node)) is not None:
                losses[node] = options
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    for head in [node for node in logits if node.target is linear_in_graph]:
        own = [node for node in logits if logits[node].head is head]
        ends = [loss for loss, options in losses.items() if options["input"] in own]
        returned = [node for node in own if output in node.users]
        read = any(user not in (*own, *ends, output) for node in own for user in node.users)
        if read or not all(_can_return(node, logits[node]) for node in returned):
            losses = {loss: options for loss, options in losses.items() if loss not in ends}
            logits = {node: found for node, found in logits.items() if found.head is not head}
    if not logits:
        return module, None
    for loss, options in losses.items():
        _replace_loss(module.graph, loss, options, logits[options["input"]])
    finish = _return_hidden(module.graph, output, [node for node in output.all_input_nodes if node in logits])
    for node in reversed(logits):
        module.graph.erase_node(node)
    module.recompile()
    return module, finish


def _example(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _after(node: fx.Node, given: _Logits) -> _Logits | None:
    """Return what a node makes of logits; None if it is none of what can be done in chunks."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    x, result = _example(given.path[-1] if given.path else given.head), _example(node)
    if x is None or result is None or sum(a is not None for a in map(_example, node.all_input_nodes)) > 1:
        return None
    if name in _CASTS:
        both = {x.dtype, result.dtype} <= {*SUMMED_IN_FLOAT32}
        return given if (both or x.dtype == result.dtype) and x.device == result.device else None
    if name == "contiguous":
        return given
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(part is ... or isinstance(part, int | slice) for part in index)
        return replace(given, path=(*given.path, node)) if plain and keeps_rows(index, x.dim()) else None
    if name in _RESHAPES:
        is_rows = result.dim() == 2 and result.shape[1] == x.shape[-1]
        return replace(given, path=(*given.path, node)) if is_rows else None
    if name == "tanh":
        return None if given.squash.tanh else replace(given, squash=replace(given.squash, tanh=True))
    if name in ("mul", *_QUOTIENTS) and len(node.args) == 2 and not node.kwargs:
        is_first = isinstance(node.args[0], fx.Node)
        factor = node.args[1] if is_first else node.args[0]
        if type(factor) not in (int, float) or (name in _QUOTIENTS and (not factor or not is_first)):
            return None
        by = 1 / float(factor) if name in _QUOTIENTS else float(factor)  # pyright: ignore[reportArgumentType]
        return replace(given, squash=given.squash.times(by))
    return None


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


def _hidden_of(graph: fx.Graph, given: _Logits) -> fx.Node:
    """Add to a graph the hidden states of logits, in the shape of their tokens."""
    hidden, weight, _, _ = given.arguments
    features = weight.meta["example_value"].shape[1]
    for node in given.path:
        if node.target is operator.getitem:
            hidden = graph.call_function(operator.getitem, (hidden, node.args[1]))
        else:
            hidden = graph.call_method("reshape", (hidden, -1, features))
    return hidden


def _replace_loss(graph: fx.Graph, loss: fx.Node, options: Mapping[str, Any], given: _Logits) -> None:
    head, result, squash = _example(given.head), _example(loss), given.squash
    assert head is not None and result is not None
    _, weight, bias, chunk_size = given.arguments
    others = (options["ignore_index"], options["reduction"], options["label_smoothing"], chunk_size)
    numbers = (squash.before, squash.tanh, squash.after, *others)
    with graph.inserting_before(loss):
        arguments = (options["target"], _hidden_of(graph, given), weight, bias, (head.dtype, result.dtype), *numbers)
        chunked = graph.call_function(_loss_in_graph, arguments)
    chunked.meta = dict(loss.meta)
    loss.replace_all_uses_with(chunked)
    graph.erase_node(loss)


def _can_return(node: fx.Node, given: _Logits) -> bool:
    """Return whether a graph may return logits without values: as its head gives them, of weights that it is given."""
    others = [a for a in given.arguments[1:3] if a is not None]
    return node is given.head and all(isinstance(a, fx.Node) and a.op == "placeholder" for a in others)


def _return_hidden(graph: fx.Graph, output: fx.Node, returned: Sequence[fx.Node]) -> Finish | None:
    """Let a graph return hidden states in place of logits; return what makes logits of them."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results: Any = output.args[0]
    found: dict[int, tuple[int, int | None, torch.dtype, int | None]] = {}
    for i, node in enumerate(results):
        if node in returned:
            _, weight, bias, chunk_size = node.args
            dtype = node.meta["example_value"].dtype
            found[i] = (inputs.index(weight), None if bias is None else inputs.index(bias), dtype, chunk_size)
    output.args = (type(results)(node.args[0] if node in returned else node for node in results),)

    def finish(inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        made = list(results)
        for i, (weight, bias, dtype, chunk_size) in found.items():
            tensors = (made[i], inputs[weight], None if bias is None else inputs[bias])
            made[i] = deferred(tensors, dtype, chunk_size)
        return made

    return finish if found else None
