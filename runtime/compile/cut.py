"""Chooses what the forward pass saves: torch's min-cut, counting the bytes of codes.

The cut matters as much as the codes. With few bits another set is the smallest: a normalized input serves the
normalization and every product that follows, a key before it is repeated for its queries, probabilities in place of
logits. And what is dequantized is written to memory anyway, so that a pointwise operation on it costs nothing more:
torch's rules against computing again what a matrix product will read do not hold here.

Torch's min-cut has no place to say what a value costs. So the cut of few bits is an instance of torch's module of our
own, in which two functions are others; torch's stays as it is.
"""

import importlib.util
import operator
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

from ...tables import Table
from ..quantizers.per_group import LEAST_ROW
from ..tensors.packing import packed_size
from ..tensors.traits import name_of
from . import integers
from .certain import type_of_places
from .codes import Groups, groups_of, hint
from .curves import arguments_of
from .factors import FADES, is_near, is_of_a_sum, multiplied_with, table_of
from .loss_gradients import APART
from .nodes import (
    aten,
    base_of,
    descendants,
    is_floating_input,
    is_pointwise,
    is_view,
    of_gradients,
    operator_of,
    packet,
    tensor_of,
    value_of,
)
from .options import CompileOptions, torch_budget
from .planes import planes_of
from .roles import ROUNDED, TO_NEAREST, Role, is_pinned, levelled, statistics_of
from .rotated import Rotation, rotation_of
from .sums import probability_dimension

_KEY = "fewbit"
_BOOLEANS = 2048  # most truth values in a group, which has no parameters
# Turned, or less a mean, they err also where they are ±1, and 1 − y² is 0, whatever that is multiplied with.
SATURATED = (aten.tanh, aten.sigmoid)
# Floating-point by torch's word: two numbers in a byte, and exponents alone, of which a group's largest is all but all.
_NO_NUMBERS = {getattr(torch, name, None) for name in ("float4_e2m1fn_x2", "float8_e8m0fnu")}


@dataclass(frozen=True)
class Choice:
    """How a value would be saved.

    Attributes:
        role: what the backward pass does with it.
        bits: of its codes, or of narrower integers; None is exact.
        groups: of its elements, if it is quantized between their minimum and maximum.
        nbytes: bytes that saving it takes.
        reason: why it is exact, or "".
        table: of a factor that is saved as codes of a table; without groups.
        rotation: of its rows, if their groups are turned (rotated.py); without groups.
        apart: dimension over which probabilities sum to 1, of which those above 1/2 are saved as 1 − p (certain.py).
    """

    role: Role
    bits: int | None
    groups: Groups | None
    nbytes: int
    reason: str = ""
    table: Table | None = None
    rotation: Rotation | None = None
    apart: int | None = None

    @property
    def is_to_nearest(self) -> bool:
        """Whether the value is rounded to nearest, whatever the options say."""
        return self.role not in ROUNDED or (self.role in TO_NEAREST and self.rotation is None)


def choice_of(node: object) -> Choice | None:
    """Return the choice that `annotate` wrote for a node, which copies of the node keep; None if it wrote none."""
    return node.meta.get(_KEY) if isinstance(node, fx.Node) else None


def pin(graph: fx.Graph, roles: Mapping[fx.Node, Role]) -> None:
    """Mark the values of a joint graph that are not computed again from rounded ones."""
    floating, apart = descendants(graph, is_floating_input), levelled(graph, statistics_of(graph))
    for node, role in roles.items():
        if role in (Role.PARAMETER, Role.INPUT):
            continue
        # Below a budget torch computes anything again, such as logits, which do not fit beside their exact sums.
        logits = role is Role.EXPONENT and not is_pointwise(node) and not is_view(node)
        # Comparisons of integers alone, such as the one-hot form of labels, are as cheap again as bits to unpack.
        if (logits or node in apart or node.meta.get(APART) or is_pinned(node)) and node in floating:
            # One of several results is saved, and what returns them is not called again.
            for pinned in (node, operator_of(node)):
                pinned.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def annotate(roles: Mapping[fx.Node, Role], options: CompileOptions, less: int = 0) -> None:
    """Write into each node of a joint graph how its value would be saved.

    Args:
        roles: of the graph's nodes.
        options: of the backend.
        less: number of bits by which each value has fewer than `options` say, but for the last one.
    """
    factors = [node for node, role in roles.items() if role is Role.FACTOR] if options.tables else []
    tables: dict[fx.Node, Table | None] = {}
    if factors:
        graph = factors[0].graph
        arguments, sources = arguments_of(graph), arguments_of(graph, through_views=True)
        of_gradient = of_gradients(graph)
        for node in factors:
            gradients = (multiplied_with(node, user) for user in node.users)
            if any(gradient and is_of_a_sum(gradient, of_gradient) for gradient in gradients):
                continue
            bits, x = options.bits_for(Role.FACTOR, module_names(node)), arguments[node]
            table = None if bits is None else table_of(node, x, sources[x], max(1, bits - less))
            tables[node] = table if table is not None and is_near(table, node, x, sources[x]) else None
    for node, role in roles.items():
        node.meta[_KEY] = _choose(node, role, tables.get(node), options, less)


def is_any_rounded(nodes: Iterable[fx.Node]) -> bool:
    """Return whether `annotate` gave any of the nodes codes that round its value."""
    choices = map(choice_of, nodes)
    return any(choice is not None and choice.bits is not None and choice.role in ROUNDED for choice in choices)


def _choose(node: fx.Node, role: Role, table: Table | None, options: CompileOptions, less: int) -> Choice:
    x = value_of(node)
    elements, exact = hint(x.numel()), nbytes_of(node)
    if role is Role.MUTATED:  # saved, it would be another when it is read: anything else is cheaper
        return Choice(role, None, None, 1 << 48, role.value)
    if role is Role.INTEGER and options.bits is not None:  # as few bytes as their range needs, exactly
        limit = integers.limit_of(node)
        width = next((width for width in integers.NARROWED if limit is not None and limit <= 1 << (width - 1)), None)
        if width is None or elements * width // 8 >= exact:
            return Choice(role, None, None, exact, role.value)
        return Choice(role, width, None, elements * width // 8)
    if role is Role.FACTOR:
        # As few as make no group are exact: a level may be far from one number, while of many the errors cancel.
        if table is not None and elements >= max(options.smallest, LEAST_ROW // 2):
            return Choice(role, table.bits, None, hint(packed_size(x.numel(), table.bits)), table=table)
        role = Role.LINEAR
    bits = 1 if role is Role.BOOLEAN and options.bits is not None else options.bits_for(role, module_names(node))
    if bits is None:
        return Choice(role, None, None, exact, role.value)
    return rounded(node, role, max(1, bits - less), options)


def rounded(node: fx.Node, role: Role, bits: int, options: CompileOptions) -> Choice:
    """Return the choice to save a node's value in `bits` bits, or exactly where that is not possible."""
    x = value_of(node)
    elements, exact = hint(x.numel()), nbytes_of(node)
    if elements < options.smallest:
        return Choice(role, None, None, exact, "small")
    if x.dtype in _NO_NUMBERS:
        return Choice(role, None, None, exact, name_of(x.dtype))
    if options.rotates(role, bits) and packet(node) not in SATURATED and FADES not in node.meta:
        unbiased = role not in (Role.SCORES, Role.NONLINEAR) and options.rounding == "stochastic"
        rotation = rotation_of(x, bits, options.group, unbiased=unbiased, centered=role is Role.SCORES)
        if rotation is not None and (few := rotation.nbytes(x)) < exact:
            return Choice(role, bits, None, few, rotation=rotation)
    most, parameters = (_BOOLEANS, 0) if role is Role.BOOLEAN else (options.group, 4)
    groups = groups_of(x, most, multiple=8 // planes_of(bits)[-1])
    if groups is None:
        return Choice(role, None, None, exact, "no groups")
    few = elements * bits // 8 + elements // groups.size * parameters
    apart = probability_dimension(node) if role is Role.PROBABILITIES else None
    if apart is not None and isinstance(size := x.shape[apart], int):
        few += elements // size * type_of_places(size).itemsize
    else:
        apart = None
    return (
        Choice(role, bits, groups, few, apart=apart) if few < exact else Choice(role, None, None, exact, "few already")
    )


def place_of(node: fx.Node) -> str:
    """Return the name of a value in options and plans: the module that computes it, and its name in the graph."""
    return f"{(module_names(node) or ('',))[-1]}:{node.name}"


def choose_by_place(forward: fx.Graph, results: int, options: CompileOptions) -> None:
    """Change the bits of what a forward graph saves to those that the options have for its place."""
    _, saved = results_and_saved(forward, results)
    for node in saved:
        choice = choice_of(node)
        if choice is None or choice.bits is None or choice.role not in ROUNDED or choice.table is not None:
            continue
        place = place_of(node)
        if place in options.places:
            bits = options.places[place]
            exact = Choice(choice.role, None, None, nbytes_of(node), "by plan")
            node.meta[_KEY] = exact if bits is None else rounded(node, choice.role, bits, options)


def widen(forward: fx.Graph, results: int, most: float, options: CompileOptions) -> None:
    """Give the gradients of a loss that a forward graph saves as many bits as `most` bytes in all allow."""
    _, saved = results_and_saved(forward, results)
    chosen = {n: c for n in saved if (c := choice_of(n)) and c.bits is not None and n.meta.get(APART)}
    for bits in range(8, 0, -1):
        for node, choice in chosen.items():
            node.meta[_KEY] = rounded(node, choice.role, bits, options) if bits > (choice.bits or 0) else choice
        if saved_bytes(forward, results) <= most:
            return


def module_names(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the modules that a node's call belongs to, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] for entry in stack.values()]
    # As torch 2.9 writes them; of a model whose forward has no named parameters, as peft's, it goes through __dict__.
    names = [re.sub(r"(?:\.__dict__\['_modules'\]|\._modules)\['(.*?)'\]", r".\1", name) for name in names]
    return tuple(name.partition("].")[2] if name.startswith("L[") else name for name in names)


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensor, 0 if its value is none."""
    x = tensor_of(node)
    return 0 if x is None else hint(x.numel()) * x.element_size()


def results_and_saved(forward: fx.Graph, results: int) -> tuple[list[Any], list[Any]]:
    """Return the nodes of the first `results` outputs of a forward graph, and of what it saves."""
    outputs: Any = forward.output_node().args[0]
    return list(outputs[:results]), list(outputs[results:])


def divide(
    gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any], *, by_codes: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward graph of a joint graph as torch divides it, leaving it as it is.

    Torch lets the backward pass compute whatever it alone needs. What `pin` wants saved is for the forward pass:
    it is among its outputs while torch divides the graph.

    Args:
        gm: the joint graph.
        joint_inputs: as the partitioner is given them.
        kwargs: likewise.
        by_codes: whether values cost the bytes of their codes.
    """
    graph = fx_graph_cse(gm.graph)  # a copy: torch changes graphs with random operators
    saved = [n for n in graph.nodes if choice_of(n) and n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    results = kwargs["num_fwd_outputs"]
    _insert_outputs(graph.output_node(), results, saved)
    kwargs = {**kwargs, "num_fwd_outputs": results + len(saved)}
    module = _counting_codes() if by_codes else partitioners
    forward, backward = module.min_cut_rematerialization_partition(fx.GraphModule(gm, graph), joint_inputs, **kwargs)
    _insert_outputs(forward.graph.output_node(), results, [], instead_of=len(saved))
    return forward, backward


def without_mutated(graph: fx.Graph, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a partitioner's arguments without inputs that the forward pass changes among weights, and their names.

    Such a buffer, spectral_norm's vector, is another one when the backward pass would read it.
    """
    placeholders = graph.find_nodes(op="placeholder")
    mutated = {n.args[0] for n in graph.nodes if n.target is aten.copy_.default}
    for description in graph.output_node().meta.get("desc") or ():
        source = getattr(description, "mutated_input", None)
        mutated |= {n for n in placeholders if source is not None and n.meta.get("desc") == source}
    static = kwargs.get("static_lifetime_input_indices") or ()
    kept = [i for i in static if placeholders[i] not in mutated]
    return {**kwargs, "static_lifetime_input_indices": kept}, {n.name for n in mutated if n in placeholders}


def copy_mutated(graph: fx.Graph, mutated: Collection[str]) -> None:
    """Let gradients read copies of the inputs of these names, which are made before the forward pass changes them.

    Torch takes such a copy in a model's code for none at all: the gradient of one that multiplies by a copy of a
    buffer, and then changes the buffer, was another's, by as much as its norm.
    """
    of_gradient = of_gradients(graph)
    for node in list(graph.nodes):
        x = tensor_of(node)
        if x is None or node in of_gradient or base_of(node).name not in mutated:
            continue
        readers = [user for user in node.users if user in of_gradient and user.target is not aten.copy_.default]
        if readers:
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,))
            fake = detect_fake_mode([x])
            with fake or nullcontext(), torch.no_grad():
                copy.meta = {**node.meta, "val": x.clone()}
            for reader in readers:
                reader.replace_input_with(node, copy)


def _insert_outputs(output: fx.Node, at: int, nodes: Sequence[fx.Node], instead_of: int = 0) -> None:
    """Insert outputs into a graph, in place of some that are there, and descriptions of them if the graph has any."""
    given: Any = output.args[0]
    values = list(given)
    values[at : at + instead_of] = nodes
    output.args = (tuple(values),)
    if "desc" in output.meta:
        descriptions = list(output.meta["desc"])
        descriptions[at : at + instead_of] = descriptions[:1] * len(nodes)
        output.meta["desc"] = descriptions


def saved_bytes(forward: fx.Graph, results: int) -> int:
    """Return the bytes that a forward graph saves, without inputs, with the choices written for its values."""
    returned, saved = results_and_saved(forward, results)
    visible = {base_of(node) for node in returned if isinstance(node, fx.Node)}
    nodes = [n for n in saved if isinstance(n, fx.Node) and tensor_of(n) is not None]
    total, exact = 0, set()
    for node in nodes:
        choice = choice_of(node)
        if choice is not None and choice.bits is not None and base_of(node) not in visible:
            total += choice.nbytes
        elif base_of(node).op != "placeholder":
            exact.add(base_of(node))
    return total + sum(map(nbytes_of, exact))


@contextmanager
def few_bit_costs(options: CompileOptions) -> Iterator[None]:
    """Let torch's min-cut compute again what is fused into reading codes.

    Its rule that knows reductions by their sizes, which are others here, gives way to `is_pinned`.
    """
    with (
        functorch_config.patch(
            ban_recompute_long_fusible_chains=False,
            ban_recompute_materialized_backward=False,
            ban_recompute_reductions=False,
            ban_recompute_used_far_apart=False,
            treat_parameters_as_free_to_save=True,
            recompute_views=True,
        ),
        torch_budget(options.recompute),
    ):
        yield


@cache
def _counting_codes() -> Any:
    """Return an instance of torch's module of partitioners that counts the bytes of codes."""
    name = f"{partitioners.__package__}._partitioners_of_fewbit"
    spec = importlib.util.spec_from_file_location(name, partitioners.__file__)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    size_of, choose, types = module._size_of, module.choose_saved_values_set, module.get_default_op_list()

    def size_in_codes(node: fx.Node) -> int:
        choice = choice_of(node)
        if choice is None or (choice.bits is None and choice.role is not Role.MUTATED):
            return size_of(node)
        # The cut counts what a kernel would not write otherwise twice. Codes are written in either case.
        fused = node.op != "placeholder" and all(types.is_fusible(node) and types.is_fusible(u) for u in node.users)
        return max(choice.nbytes // (2 if fused else 1), 1)

    def choose_tensors(*args: Any, **kwargs: Any) -> list[fx.Node]:
        chosen: list[fx.Node] = []
        for node in choose(*args, **kwargs):
            several = isinstance(node.meta.get("val"), tuple | list)  # torch may save an operator: its results, then
            chosen += [user for user in node.users if user.target is operator.getitem] if several else [node]
        return chosen

    module._size_of, module.choose_saved_values_set = size_in_codes, choose_tensors
    return module
