"""Puts codes between a forward graph and its backward graph, in place of the values that one saves for the other."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config, inductor_prims

from ...tables import FewbitError
from .. import ops
from ..tensors.levels import table_text
from ..tensors.traits import name_of
from .certain import set_apart
from .codes import (
    Form,
    dequantize,
    dequantize_by_kernel,
    has_kernels,
    memory_order,
    pack_bools,
    quantize,
    quantize_by_kernel,
    unpack_bools,
)
from .curves import arguments_of
from .cut import Choice, choice_of, module_names, nbytes_of, results_and_saved
from .factors import multiplied_with
from .integers import narrowed, widened
from .nodes import base_of, tensor_of, value_of
from .options import CompileOptions
from .planes import contiguous_strides
from .report import SavedTensor
from .roles import ROUNDED, Role
from .splice import Splicer, after_last_use, before_first_use, operations, placeholder, some_placeholder
from .sums import complete_sums, sum_again
from .turning import dequantize_turned, draw_keys, draw_seed_on, quantize_turned

_LARGEST = 2**63 - 1  # seeds are int64, and not negative
# Torch's mark of what a function put into its context by another way than `save_for_backward`: it stands last, and
# torch takes as many of the last tensors for such as have the mark. What was written in place since is read anyway.
_UNCHECKED = "saved_tensor_with_no_vc_check"


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
    tensors = [node for node in saved if isinstance(node, fx.Node) and tensor_of(node) is not None]
    read = {node.name: node for node in backward.find_nodes(op="placeholder")}
    choices = {node: _choice(node, visible, read.get(node.name)) for node in tensors}
    few = {node: choice for node, choice in choices.items() if choice is not None and choice.bits is not None}
    if few and config.cpp_wrapper:  # it takes a list of one tensor for a tensor, and writes tables without escapes
        raise FewbitError(
            "torch's C++ wrapper cannot call fewbit's operators: set torch._inductor.config.cpp_wrapper to False"
        )
    arguments = arguments_of(forward)
    encoded = [_Encoded(n, arguments[n], table_text(c.table)) for n, c in few.items() if c.table is not None]
    rounded = {node: choice for node, choice in few.items() if choice.table is None}
    splicer = Splicer()
    sum_again(backward, tensors, few, splicer)
    parts: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for one in encoded:  # right behind what they are functions of
        x = one.argument
        with forward.inserting_before(operations(forward) if x.op == "placeholder" else x.next):
            parts[one.factor] = splicer.splice(forward, partial(_encode, table=one.table, order=one.order), x)
    output.args = (tuple(results + _parts_of(saved, parts)),)
    forward.eliminate_dead_code()  # the factors themselves, which would read their arguments at the end of the pass
    turned = {node: choice for node, choice in rounded.items() if choice.rotation is not None}
    rounded = {node: choice for node, choice in rounded.items() if choice.rotation is None}
    dimensions = {node: choice.apart for node, choice in rounded.items() if choice.apart is not None}
    pairs = set_apart(forward, backward, dimensions, splicer)
    rounded = {pairs[node][0] if node in pairs else node: choice for node, choice in rounded.items()}
    output.args = ((*results, *_parts_of(saved, parts | {p: (q, place) for p, (q, place, _) in pairs.items()})),)
    parts |= _quantize_all(forward, rounded, options, splicer)
    keys = draw_keys(forward, turned, splicer)
    parts |= quantize_turned(forward, turned, keys, splicer)
    dequantize_turned(backward, turned, keys, parts, tensors, splicer)
    _multiply_all(backward, encoded, parts, splicer)
    _dequantize_all(backward, rounded, parts, {q: reading for q, _, reading in pairs.values()}, splicer)
    parts |= {p: (*parts.pop(q), place) for p, (q, place, _) in pairs.items()}
    for node in parts:
        for part in parts[node] if node.meta.get(_UNCHECKED) else ():
            part.meta[_UNCHECKED] = True
    kept = [*keys.values(), *_parts_of(saved, parts)]
    output.args = (tuple(results + kept),)
    descriptions = output.meta.get("desc")
    if descriptions is not None:  # torch expects one of each output
        from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

        output.meta["desc"] = [*descriptions[:outputs], *map(SavedForBackwardsAOTOutput, range(len(kept)))]
    # Of several views of one value the first counts what they hold.
    first = {base_of(node): node for node in reversed(choices) if not parts.get(node)}
    return [_row(node, c, parts.get(node, ()), first.get(base_of(node)) is node) for node, c in choices.items()]


def _parts_of(saved: Sequence[Any], parts: Mapping[fx.Node, tuple[fx.Node, ...]]) -> list[Any]:
    """Return the parts that values are saved as, and the others themselves."""
    return [part for value in saved for part in parts.get(value, (value,))]


def _choice(node: fx.Node, visible: Collection[fx.Node], read: fx.Node | None) -> Choice | None:
    """Return how a value is saved that the backward graph reads as `read`.

    Exactly if it is in the memory of a result, one of `visible`, and if it has a table and is not multiplied alone.
    """
    choice = choice_of(node)
    if choice is not None and base_of(node) in visible:
        return Choice(Role.OTHER, None, None, nbytes_of(node), "an output")
    if choice is None or choice.table is None:
        return choice
    if read is None or None in [multiplied_with(read, user) for user in read.users]:
        return Choice(Role.FACTOR, None, None, nbytes_of(node), "other uses")
    return choice


# ---- factors with tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    """A factor that is saved as codes.

    Attributes:
        factor: F(x), in the forward graph.
        argument: x.
        table: of F, as text.
    """

    factor: fx.Node
    argument: fx.Node
    table: str

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of x in memory order, which is that of the codes."""
        x = value_of(self.argument)
        return tuple(memory_order(x) or range(x.dim()))


def _multiply_all(
    graph: fx.Graph, encoded: Sequence[_Encoded], parts: Mapping[fx.Node, tuple[fx.Node, ...]], splicer: Splicer
) -> None:
    """Replace the products of gradients with saved factors by those with the levels of their codes."""
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for one in encoded:
        factor = placeholders[one.factor.name]
        with graph.inserting_before(factor):
            (codes,) = (placeholder(graph, part) for part in parts[one.factor])
        function = partial(_multiply, table=one.table, order=one.order)
        for user in list(factor.users):
            gradient = multiplied_with(factor, user)
            assert gradient is not None  # as `_choice` asks
            with graph.inserting_before(user):
                (product,) = splicer.splice(graph, function, gradient, codes)
            user.replace_all_uses_with(product)
            graph.erase_node(user)
        graph.erase_node(factor)


def _encode(x: Tensor, *, table: str, order: tuple[int, ...]) -> Tensor:
    return ops.encode(x.permute(order).contiguous(), table)


def _multiply(gradient: Tensor, codes: Tensor, *, table: str, order: tuple[int, ...]) -> Tensor:
    gradient = gradient.permute(order).contiguous()
    product = ops.multiply(gradient, codes, table, contiguous_strides(gradient.shape))
    return product.permute([order.index(d) for d in range(len(order))])


# ---- all that is rounded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """Values that are quantized, or dequantized, at one place: several by a kernel, else one.

    Attributes:
        before: the node before which they are.
        nodes: the values, in the forward graph.
        by_kernel: whether a kernel takes them.
    """

    before: fx.Node
    nodes: tuple[fx.Node, ...]
    by_kernel: bool


def _calls(rounded: Mapping[fx.Node, Choice], place_of: Callable[[fx.Node], fx.Node]) -> list[_Call]:
    """Return the calls for all values: kernels take those of one place and dtype together, which saves time."""
    found: defaultdict[tuple[fx.Node, object], list[fx.Node]] = defaultdict(list)
    for node, choice in rounded.items():
        x = value_of(node)
        groups = choice.groups if choice.role in ROUNDED else None
        by_kernel = groups is not None and has_kernels(x.device, x.dtype, groups)
        found[place_of(node), x.dtype if by_kernel else node].append(node)
    return [_Call(place, (*nodes,), isinstance(kind, torch.dtype)) for (place, kind), nodes in found.items()]


# ---- the forward graph -----------------------------------------------------------------------------------------------


def _quantize_all(
    graph: fx.Graph, rounded: Mapping[fx.Node, Choice], options: CompileOptions, splicer: Splicer
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the nodes of the parts that each value is saved as, computed right after its last use."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    calls = _calls(rounded, lambda node: after_last_use(node, order))
    at_random = {
        node: options.rounding == "stochastic" and not choice.is_to_nearest for node, choice in rounded.items()
    }
    drawing = [call for call in calls if any(map(at_random.__getitem__, call.nodes))]
    if config.fallback_random and not all(call.by_kernel for call in drawing):
        raise FewbitError(
            'rounding="stochastic" draws by Inductor: set torch._inductor.config.fallback_random to False, '
            'or rounding="nearest"'
        )
    seeds = _seeds(graph, drawing, splicer)
    parts: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for call in calls:
        choices = [rounded[node] for node in call.nodes]
        if call.by_kernel:
            drawn = tuple(at_random[node] for node in call.nodes)
            function = partial(quantize_by_kernel, forms=tuple(map(_form, choices)), stochastic=drawn)
        else:
            function = _saving(choices[0])
        with graph.inserting_before(call.before):
            results = splicer.splice(graph, function, *call.nodes, *seeds.get(call, ()))
        parts |= zip(call.nodes, ((r,) for r in results), strict=True) if call.by_kernel else {call.nodes[0]: results}
    return parts


def _saving(choice: Choice) -> "partial[tuple[Tensor, ...]]":
    """Return the function of a value, and a seed where it is rounded at random, that returns what is saved of it."""
    if choice.role is Role.INTEGER:
        assert choice.bits is not None
        return partial(narrowed, bits=choice.bits)
    if choice.role is Role.BOOLEAN:
        return partial(pack_bools, groups=_form(choice)[0])
    return partial(_quantize, form=_form(choice))


def _form(choice: Choice) -> Form:
    assert choice.groups is not None and choice.bits is not None
    return choice.groups, choice.bits


def _quantize(x: Tensor, seed: Tensor | None = None, *, form: Form) -> tuple[Tensor, ...]:
    groups, bits = form
    random = None
    if seed is not None:
        random = inductor_prims.random([*groups.rows(x).shape[:-1], 1], seed, "rand")
    return quantize(x, groups, bits, random)


def _seeds(graph: fx.Graph, calls: list[_Call], splicer: Splicer) -> dict[_Call, tuple[fx.Node]]:
    """Return the seeds of each call: of all its values, int64 (N,) on the CPU, or of its one value, () on its device.

    They are of fewbit's own stream, so that torch's generators are not moved, and drawn behind the placeholders, on the
    device where they are used: nothing of the host stands in a graph of a GPU.
    """
    if not calls:
        return {}
    kernels = [call for call in calls if call.by_kernel]
    others: defaultdict[torch.device, list[_Call]] = defaultdict(list)
    for call in calls:
        if not call.by_kernel:
            others[call.nodes[0].meta["val"].device].append(call)
    found: dict[_Call, tuple[fx.Node]] = {}
    with graph.inserting_before(operations(graph)):
        for device in dict.fromkeys([*(torch.device("cpu") for _ in kernels[:1]), *others]):
            of_one = others.get(device, [])
            of_many = kernels if device.type == "cpu" else []
            sizes = (*(len(call.nodes) for call in of_many), *([len(of_one)] if of_one else []))
            draw = partial(_draw_seeds, device=device, sizes=sizes)
            drawn = splicer.splice(graph, draw, some_placeholder(graph, device))
            found |= {call: (seeds,) for call, seeds in zip(of_many, drawn, strict=False)}
            if of_one:
                separated = splicer.splice(graph, partial(_separated, device=device), drawn[-1])
                found |= {call: (seed,) for call, seed in zip(of_one, separated, strict=True)}
    return found


def _draw_seeds(some: Tensor, *, device: torch.device, sizes: tuple[int, ...]) -> list[Tensor]:
    drawn = draw_seed_on(some, device=device)  # one key a step, and those that follow it
    return list((drawn + torch.arange(sum(sizes), device=drawn.device) & _LARGEST).split(sizes))


def _separated(seeds: Tensor, *, device: torch.device) -> list[Tensor]:
    return ops.separate(seeds.to(device, non_blocking=True))


# ---- the backward graph ----------------------------------------------------------------------------------------------


def _dequantize_all(
    graph: fx.Graph,
    rounded: Mapping[fx.Node, Choice],
    parts: Mapping[fx.Node, tuple[fx.Node, ...]],
    reading: Mapping[fx.Node, fx.Node],
    splicer: Splicer,
) -> None:
    """Replace the placeholder of each saved value by those of its parts, dequantized right before its first use.

    The placeholders have the values' names, but for those that `reading` has.
    """
    named = {node.name: node for node in graph.find_nodes(op="placeholder")}
    placeholders = {node: reading.get(node) or named[node.name] for node in rounded}
    order = {node: place for place, node in enumerate(graph.nodes)}

    for call in _calls(rounded, lambda node: before_first_use(placeholders[node], order)):
        inputs: list[fx.Node] = []
        for node in call.nodes:
            with graph.inserting_before(placeholders[node]):
                inputs += [placeholder(graph, part) for part in parts[node]]
        choices, dtype = [rounded[node] for node in call.nodes], call.nodes[0].meta["val"].dtype
        if call.by_kernel:
            function = partial(dequantize_by_kernel, forms=tuple(map(_form, choices)), dtype=dtype)
        else:
            function = _restoring(choices[0], dtype)
        with graph.inserting_before(call.before):
            values = splicer.splice(graph, function, *inputs)
        for node, value in zip(call.nodes, values, strict=True):
            placeholders[node].replace_all_uses_with(value)
            graph.erase_node(placeholders[node])
            complete_sums(graph, node, value, splicer)


def _restoring(choice: Choice, dtype: torch.dtype) -> "partial[Tensor]":
    """Return the function of what `_saving` returned that returns the value."""
    if choice.role is Role.INTEGER:
        return partial(widened, dtype=dtype)
    if choice.role is Role.BOOLEAN:
        return partial(unpack_bools, groups=_form(choice)[0])
    groups, bits = _form(choice)
    return partial(dequantize, groups=groups, bits=bits, dtype=dtype)


def _row(node: fx.Node, choice: Choice | None, parts: Sequence[fx.Node], is_first: bool) -> SavedTensor:
    x, nbytes = value_of(node), sum(map(nbytes_of, parts)) if parts else nbytes_of(base_of(node)) * is_first
    is_input = base_of(node).op == "placeholder" and (choice is None or choice.bits is None)
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")  # the innermost last
    return SavedTensor(
        name=node.name,
        module=(module_names(node) or ("",))[-1],
        source=":".join(lines[-1]) if lines else "",
        shape=tuple(s if isinstance(s, int) else str(s) for s in x.shape),
        dtype=name_of(x.dtype),
        role=choice.role.value if choice else Role.OTHER.value,
        bits=choice.bits if choice else None,
        exact_bytes=nbytes_of(node),
        nbytes=0 if is_input else nbytes,
        reason=choice.reason if choice else "not a value of the forward pass",
        parts=tuple(part.name for part in parts),
    )
