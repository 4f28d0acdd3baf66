"""Puts codes between a forward graph and its backward graph, in place of the values that one saves for the other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from .. import ops
from .codes import (
    Groups,
    dequantize,
    dequantize_by_kernel,
    has_kernels,
    pack_bools,
    quantize,
    quantize_by_kernel,
    unpack_bools,
)
from .cut import Choice, choice_of, module_names, nbytes_of, results_and_saved
from .options import CompileOptions
from .report import SavedTensor
from .roles import Role, base_of, is_view, tensor_of
from .splice import Splicer

_LARGEST = 2**63 - 1
_TO_NEAREST = (Role.ATTENTION, Role.NONLINEAR)  # at random they would be as biased, and err more


def rewrite(forward: fx.Graph, backward: fx.Graph, outputs: int, options: CompileOptions) -> list[SavedTensor]:
    """Quantize in `forward` what it saves, dequantize it in `backward`, and report each saved tensor.

    Args:
        forward: returns the `outputs` results of the pass, then what is saved.
        backward: has a placeholder of the same name for each saved value.
        outputs: number of results.
        options: of the backend.
    """
    output = forward.output_node()
    results, saved = results_and_saved(forward, outputs)
    visible = {base_of(node) for node in results if isinstance(node, fx.Node)}
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    place, place_in_backward = _places(forward), _places(backward)
    splicer = Splicer()
    seeds = _Seeds(forward, len(saved), splicer)
    kept: list[fx.Node] = []
    report: list[SavedTensor] = []
    for node in saved:
        choice = choice_of(node)
        if choice is not None and base_of(node) in visible:
            choice = Choice(Role.OTHER, None, None, nbytes_of(node), "an output")
        if choice is None or choice.bits is None:
            kept.append(node)
        else:
            parts = _quantized(forward, node, _last_use(node, place), choice, options, seeds, splicer)
            first = min(placeholders[node.name].users, key=place_in_backward.__getitem__)
            _dequantized(backward, placeholders[node.name], first, parts, choice, splicer)
            kept += parts
        if isinstance(node, fx.Node) and tensor_of(node) is not None:
            report.append(_row(node, choice))
    output.args = (tuple(results + kept),)
    _describe(output, outputs, len(kept))
    return report


class _Seeds:
    """Seeds of a forward graph, of fewbit's own stream, so that torch's generators are not moved."""

    def __init__(self, graph: fx.Graph, count: int, splicer: Splicer) -> None:
        self.graph = graph
        self.count = count
        self.seeds: dict[torch.device, Iterator[fx.Node]] = {}
        self.splicer = splicer

    def next(self, device: torch.device) -> fx.Node:
        """Return a new seed on a device, int64 (), drawn behind the placeholders."""
        if device not in self.seeds:
            some = next(n for n in self.graph.nodes if n.op == "placeholder" and tensor_of(n) is not None)
            draw = partial(_draw_seeds, count=self.count, device=device)
            with self.graph.inserting_before(_after(some)):
                self.seeds[device] = iter(self.splicer.splice(self.graph, draw, some))
        return next(self.seeds[device])


def _draw_seeds(some: Tensor, count: int, device: torch.device) -> list[Tensor]:
    seeds = ops.draw_seeds(some, 1) + torch.arange(count) & _LARGEST  # one key a step, and those that follow it
    return ops.separate(seeds.to(device, non_blocking=True))


def _quantize(x: Tensor, seed: Tensor | None = None, *, groups: Groups, bits: int) -> tuple[Tensor, ...]:
    if has_kernels(x.device, x.dtype, groups):
        return (quantize_by_kernel(x, seed, groups, bits),)
    if seed is None:
        return quantize(x, groups, bits, None)
    size = [*groups.rows(x).shape[:-1], 1]
    return quantize(x, groups, bits, inductor_prims.random(size, seed, "rand"))


def _quantized(
    graph: fx.Graph,
    node: fx.Node,
    last: fx.Node,
    choice: Choice,
    options: CompileOptions,
    seeds: _Seeds,
    splicer: Splicer,
) -> tuple[fx.Node, ...]:
    """Return nodes of the parts that the value of `node` is saved as, computed right after `last`, its last use."""
    x = tensor_of(node)
    assert x is not None
    inputs: tuple[fx.Node, ...] = (node,)
    groups, bits = choice.groups, choice.bits
    assert groups is not None and bits is not None
    if choice.role is Role.BOOLEAN:
        function = partial(pack_bools, groups=groups)
    else:
        function = partial(_quantize, groups=groups, bits=bits)
        if options.rounding == "stochastic" and choice.role not in _TO_NEAREST:
            inputs = node, seeds.next(x.device)
    with graph.inserting_before(_after(last if last.op != "placeholder" else inputs[-1])):
        return splicer.splice(graph, function, *inputs)


def _dequantized(
    graph: fx.Graph, placeholder: fx.Node, first: fx.Node, parts: Sequence[fx.Node], choice: Choice, splicer: Splicer
) -> None:
    """Replace a saved value's placeholder by those of its parts, dequantized right before `first`, its first use."""
    x, groups, bits = tensor_of(placeholder), choice.groups, choice.bits
    assert x is not None and groups is not None and bits is not None
    with graph.inserting_before(placeholder):
        inputs = [_placeholder(graph, part) for part in parts]
    function = partial(_restored, groups=groups, bits=bits, dtype=x.dtype)
    with graph.inserting_before(first):
        (value,) = splicer.splice(graph, function, *inputs)
    placeholder.replace_all_uses_with(value)
    graph.erase_node(placeholder)


def _restored(*parts: Tensor, groups: Groups, bits: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return unpack_bools(parts, groups)
    if has_kernels(parts[0].device, dtype, groups):
        return dequantize_by_kernel(parts[0], groups, bits, dtype)
    return dequantize(parts, groups, bits, dtype)


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the place of each node in the order of execution."""
    return {node: place for place, node in enumerate(graph.nodes)}


def _last_use(node: fx.Node, place: Mapping[fx.Node, int]) -> fx.Node:
    """Return the last node that reads the value, through views too; `node` itself if only the output does."""
    last, same = node, [node]
    while same:
        for user in same.pop().users:
            if user.op == "output" or user not in place:  # what was inserted makes codes of views
                continue
            last = max(last, user, key=place.__getitem__)
            if is_view(user):
                same.append(user)
    return last


def _after(node: fx.Node) -> fx.Node:
    """Return the node after `node` and after the placeholders, which come before all else."""
    return next(n for n in _following(node) if n.op != "placeholder")


def _following(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _placeholder(graph: fx.Graph, part: fx.Node) -> fx.Node:
    node = graph.placeholder(part.name)
    node.target = node.name  # two arguments of one name would be one
    node.meta = {key: part.meta[key] for key in ("val", "tensor_meta") if key in part.meta}
    return node


def _describe(output: fx.Node, results: int, saved: int) -> None:
    """Give the forward graph's output a description of each of its values, which torch expects."""
    descriptions = output.meta.get("desc")
    if descriptions is not None:
        from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

        output.meta["desc"] = [*descriptions[:results], *map(SavedForBackwardsAOTOutput, range(saved))]


def _row(node: fx.Node, choice: Choice | None) -> SavedTensor:
    x = tensor_of(node)
    assert x is not None
    is_input = base_of(node).op == "placeholder"
    return SavedTensor(
        name=node.name,
        module=(module_names(node) or ("",))[-1],
        source=_source(node),
        shape=tuple(s if isinstance(s, int) else str(s) for s in x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        role=choice.role.value if choice else Role.OTHER.value,
        bits=choice.bits if choice else None,
        exact_bytes=nbytes_of(node),
        nbytes=0 if is_input else choice.nbytes if choice else nbytes_of(node),
        reason=choice.reason if choice else "not a value of the forward pass",
    )


def _source(node: fx.Node) -> str:
    """Return the innermost line of code that computed the value, "file:line"."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(lines[-1]) if lines else ""
