"""Divides a joint graph into forward and backward pass with few bits between them.

1  annotate  each value by its role (roles.py): what saving it would cost with its role's bits (cut.py)
2  cut       torch's min-cut with these costs chooses what is saved and what is computed again (cut.py); where rows may
             hardly differ, once more, with codes of what they differ by (centering.py); and where a loss has a gradient
             that vanishes as it is met, once more with codes of that (loss_gradients.py)
3  rewrite   quantize what is saved after its last use in the forward graph, dequantize it before its first in the
             backward graph (rewrite.py, codes.py), and write results there over what is read no more (in_place.py)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import custom_graph_pass
from torch.utils.flop_counter import flop_registry

from ...tables import FewbitError
from .attention import arguments_by_name, defer, expand, is_attention, is_projection
from .branches import bound_branches
from .centering import center
from .codes import hint
from .cut import (
    annotate,
    choice_of,
    choose_by_place,
    copy_mutated,
    divide,
    few_bit_costs,
    is_any_rounded,
    module_names,
    nbytes_of,
    pin,
    results_and_saved,
    saved_bytes,
    widen,
    without_mutated,
)
from .factors import merge
from .host import offload
from .in_place import overwrite
from .levelling import scale_back, unite
from .loss_gradients import set_apart
from .nodes import base_of, packet, tensor_of
from .options import CompileOptions, torch_budget
from .own_memory import save_in_own_memory
from .releases import is_untested, warn_of_untested
from .report import GraphReport, record
from .rewrite import rewrite
from .roles import ROUNDED, Role, classify, is_saved_itself, statistics_of, weights_among
from .saturation import fades

# Not there before torch 2.9, where the backend refuses before there is a partitioner (`backend.is_supported`).
_CustomPartitioner: Any = getattr(custom_graph_pass, "CustomPartitionerFn", object)


@dataclass(frozen=True)
class _Joint:
    """A joint graph to be divided.

    Attributes:
        gm: has the graph, which changes.
        inputs, kwargs: as the partitioner is given them.
        weights: names of the placeholders that live on between steps.
        mutated: names of those that are written to.
        restored: names of values that are exact.
        as_it_is: the graph before what was written for codes alone.
    """

    gm: fx.GraphModule
    inputs: Sequence[object]
    kwargs: dict[str, Any]
    weights: Collection[str]
    mutated: Collection[str]
    restored: Collection[str]
    as_it_is: fx.Graph

    @property
    def results(self) -> int:
        """Return the number of the forward pass's own results."""
        return self.kwargs["num_fwd_outputs"]


@dataclass(frozen=True)
class _Division:
    """A divided joint graph: both passes, the roles of its values, and the bytes that the forward pass saves."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    roles: Mapping[fx.Node, Role]
    nbytes: int


class FewbitPartitioner(_CustomPartitioner):
    """Inductor's partitioner with few bits for what the passes share.

    Inductor pickles it into the keys of its caches, and asks for `uuid`.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options

    def uuid(self) -> str:
        """Return what tells this partitioner from others in Inductor's caches."""
        return self.options.uuid()

    def __reduce__(self) -> tuple[Any, ...]:
        return FewbitPartitioner, (self.options,)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph: torch's, where an untested torch refuses ours."""
        if not is_untested():
            return self.partition(gm, joint_inputs, kwargs)
        try:
            return self.partition(fx.GraphModule(gm, fx_graph_cse(gm.graph)), joint_inputs, dict(kwargs))
        except FewbitError:
            raise
        except Exception as error:  # whatever the private names of torch that this uses have become
            warn_of_untested(error)
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of a joint graph, which is changed, with few bits between them."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        if any([unite(gm.graph), bound_branches(gm.graph)]):
            gm.graph = fx_graph_cse(gm.graph)
        if not joint_inputs:  # a region that is compiled apart: nothing says which of its inputs are weights
            return divide(gm, joint_inputs, kwargs)
        results = kwargs["num_fwd_outputs"]
        budget = inf if self.options.budget is None else int(self.options.budget)
        exact = saved_bytes(divide(gm, joint_inputs, kwargs)[0].graph, results)
        apart = fx_graph_cse(gm.graph)
        is_rounded = self.options.bits_for(Role.LINEAR, ()) is not None
        marked = set_apart(apart, self.options.smallest) if is_rounded else []
        joint = self.prepared(gm, joint_inputs, kwargs)
        best = self.best(joint, exact, budget)
        if marked:
            joint_apart = self.prepared(fx.GraphModule(gm, apart), joint_inputs, kwargs)
            best_apart = self.best(joint_apart, exact, budget)
            small = sum(nbytes_of(node) for node in marked if not self.is_large(node))
            most = min(best.nbytes + small, max(best.nbytes, exact))
            if best_apart.nbytes <= most:
                joint, best = joint_apart, best_apart
                widen(best.forward.graph, results, min(most, budget), self.options)
        if best.nbytes > budget:
            raise FewbitError(f"1 bit for each value takes {best.nbytes:,} bytes, the budget is {budget:,}")
        save_in_own_memory(best.forward.graph, results, joint.weights)
        return self.finish(best.forward, best.backward, results, exact)

    def prepared(self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> _Joint:
        """Return a joint graph to be divided, in which gradients are written so that few bits serve."""
        if self.options.bits_for(Role.LINEAR, ()) is not None:
            merge(gm.graph, self.options.bits_for(Role.FACTOR, ()) if self.options.tables else None, fades)
            gm.graph = fx_graph_cse(gm.graph)  # what was written may be there already, and have other uses
        kwargs, mutated = without_mutated(gm.graph, kwargs)
        copy_mutated(gm.graph, mutated)
        as_it_is = fx_graph_cse(gm.graph)
        defer(gm.graph, self.rounds)
        statistics, results = statistics_of(gm.graph), kwargs["num_fwd_outputs"]
        restored = {n.name for n in scale_back(gm.graph, results, statistics, self.is_rounded, is_saved_itself)}
        placeholders = gm.graph.find_nodes(op="placeholder")
        held = [placeholders[i] for i in kwargs["static_lifetime_input_indices"]]
        weights = {node.name for node in weights_among(gm.graph, held, results)}
        return _Joint(gm, joint_inputs, kwargs, weights, mutated, restored, as_it_is)

    def best(self, joint: _Joint, exact: int, budget: float) -> _Division:
        """Return the graphs of a joint graph, which is changed, that save at most `exact` bytes, `budget` if any do."""
        best = self.pinned(joint, joint.restored)
        if best.nbytes > exact:
            # Torch computes again what here is pinned, from fewer bytes. Its cut, then, and nothing is rounded.
            joint.gm.graph = joint.as_it_is
            roles = self.roles(joint).items()
            best = self.divide(joint, {node: Role.OTHER if role in ROUNDED else role for node, role in roles})
        else:
            best = self.centered(joint, best, joint.restored, min(exact, budget))
        for less in range(1, 8):
            if best.nbytes > budget:
                best = self.divide(joint, best.roles, less)
        return best

    def pinned(self, joint: _Joint, restored: Collection[str]) -> _Division:
        """Return the graphs of the least bytes that compute nothing again from rounded values; `restored` are exact."""
        roles = self.roles(joint, restored)
        pin(joint.gm.graph, roles)
        return self.divide(joint, roles)

    def centered(self, joint: _Joint, found: _Division, restored: Collection[str], most: float) -> _Division:
        """Return the graphs with codes of what rows differ by, where that matters, or those that were found.

        Args:
            joint: the graph, which is changed.
            found: how it is divided without.
            restored: names of values that are exact.
            most: bytes that may be saved.
        """
        graph = joint.gm.graph
        as_it_was = fx_graph_cse(graph)
        sums, means = center(graph, _in_codes(found.forward.graph, joint.results))
        if not sums:
            return found
        restored = {*restored, *(node.name for node in sums)}
        centered = self.pinned(joint, restored)
        if centered.nbytes <= min(found.nbytes + means, most):
            return centered
        joint.gm.graph = as_it_was
        return self.pinned(joint, restored)

    def rounds(self, node: fx.Node) -> bool:
        """Return whether a value is, for attention's queries or keys, rounded so that attention is computed again."""
        return self.is_large(node) and self.options.recomputes_attention(
            module_names(base_of(node)), is_projection(node)
        )

    def is_rounded(self, node: fx.Node) -> bool:
        """Return whether a value that enters gradients linearly is saved in codes."""
        return self.is_large(node) and self.options.bits_for(Role.LINEAR, module_names(base_of(node))) is not None

    def is_large(self, node: fx.Node) -> bool:
        """Return whether a value has enough elements to be rounded."""
        x = tensor_of(node)
        return x is not None and hint(x.numel()) >= self.options.smallest

    def roles(self, joint: _Joint, restored: Collection[str] = ()) -> dict[fx.Node, Role]:
        """Return the role of each value of a joint graph; those of the names `restored` are exact."""
        graph = joint.gm.graph
        placeholders = graph.find_nodes(op="placeholder")
        roles = classify(graph, {node for node in placeholders if node.name in joint.weights})
        roles |= {n: Role.OTHER for n, role in roles.items() if n.name in restored and role in ROUNDED}
        return roles | {node: Role.MUTATED for node in roles if base_of(node).name in joint.mutated}

    def divide(self, joint: _Joint, roles: Mapping[fx.Node, Role], less: int = 0) -> _Division:
        """Return the graphs of the least bytes, with `less` bits fewer for each value than the options say."""
        annotate(roles, self.options, less)
        # Where nothing is rounded, torch's rules of what is too slow to compute again hold.
        few = is_any_rounded(roles)
        with few_bit_costs(self.options) if few else torch_budget(self.options.recompute):
            by_codes = few or Role.MUTATED in roles.values()
            forward, backward = divide(joint.gm, joint.inputs, joint.kwargs, by_codes=by_codes)
        return _Division(forward, backward, roles, saved_bytes(forward.graph, joint.results))

    def finish(
        self, forward: fx.GraphModule, backward: fx.GraphModule, results: int, exact: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the divided graphs with codes between them, and record what they save."""
        graphs, report = self.with_codes(forward, backward, results, exact)
        record(report, self)
        return graphs

    def with_codes(
        self, forward: fx.GraphModule, backward: fx.GraphModule, results: int, exact: int
    ) -> tuple[tuple[fx.GraphModule, fx.GraphModule], GraphReport]:
        """Put codes between the graphs; return them, and what they save."""
        _, kept = results_and_saved(forward.graph, results)
        few = (node for node in kept if (choice := choice_of(node)) is not None and choice.role in ROUNDED)
        unmatched = self.options.unmatched({name for node in few for name in module_names(node)})
        choose_by_place(forward.graph, results, self.options)
        expand(backward.graph)
        again = _share_of_attention_again(forward.graph, backward.graph)
        saved = rewrite(forward.graph, backward.graph, results, self.options)
        moved = 0
        if (most := self.options.host_memory) is not None:
            codes = {part for tensor in saved if tensor.bits is not None for part in tensor.parts}
            moved = offload(forward, backward, results, codes, int(most))
        overwrite(backward.graph)
        for module in (forward, backward):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
        return (forward, backward), GraphReport(tuple(saved), exact, again, moved, unmatched)


def _in_codes(forward: fx.Graph, results: int) -> set[str]:
    """Return the names of what a forward graph saves in codes of groups, other than attention's."""
    returned, saved = results_and_saved(forward, results)
    visible = {base_of(node) for node in returned if isinstance(node, fx.Node)}
    choices = {node.name: choice for node in saved if (choice := choice_of(node)) and base_of(node) not in visible}
    few = {name: choice for name, choice in choices.items() if choice.bits is not None and choice.table is None}
    return {name for name, choice in few.items() if choice.role in (Role.LINEAR, Role.FACTOR, Role.NONLINEAR)}


# ---- what computing attention again costs ----------------------------------------------------------------------------

_BACKWARD = 2.5  # of attention's forward pass: scores again, and four products


def _share_of_attention_again(forward: fx.Graph, backward: fx.Graph) -> float:
    """Return the operations of attention's forward passes in a backward graph, relative to all others of both graphs.

    Args:
        forward, backward: divided graphs, with values in their nodes' `meta`.
    """
    calls = (node for node in backward.nodes if node.op == "call_function" and is_attention(node))
    again = sum(_operations(node) for node in calls if "backward" not in str(node.target))
    total = sum(_operations(node) for graph in (forward, backward) for node in graph.nodes)
    return again / (total - again) if again else 0.0


def _operations(node: fx.Node) -> float:
    if node.op != "call_function":
        return 0.0
    if is_attention(node):
        read = (arguments_by_name(node).get(name) for name in ("query", "key"))
        query, key = (tensor_of(value) if isinstance(value, fx.Node) else None for value in read)
        if query is None or key is None:
            return 0.0
        forward = 4.0 * hint(query.numel()) * hint(key.shape[-2])  # two products, of two operations a term
        return forward * (_BACKWARD if "backward" in str(node.target) else 1.0)
    count = flop_registry.get(packet(node))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _shaped)
    return float(count(*args, **kwargs, out_val=_shaped(node)))


def _shaped(node: fx.Node) -> Any:
    """Return an empty tensor on the meta device of a value's sizes, which may be symbols."""
    x = node.meta.get("val")
    if isinstance(x, Tensor):
        return x.new_empty([hint(size) for size in x.shape], device="meta")
    return x
