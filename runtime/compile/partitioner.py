"""Divides a joint graph into forward and backward pass with few bits between them.

1  annotate  each value by its role (roles.py): what saving it would cost with its role's bits (cut.py)
2  cut       torch's min-cut with these costs chooses what is saved and what is computed again (cut.py)
3  rewrite   quantize what is saved after its last use in the forward graph, dequantize it before its first in the
             backward graph (rewrite.py, codes.py)
"""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import custom_graph_pass

from ...tables import FewbitError
from .budget import torch_budget
from .cut import annotate, choose_by_place, divide, few_bit_costs, is_any_rounded, pin, saved_bytes
from .factors import merge
from .options import CompileOptions
from .report import GraphReport, record
from .rewrite import rewrite
from .roles import Role, classify

# Not there before torch 2.9, where the backend refuses before there is a partitioner (`backend.is_supported`).
_CustomPartitioner: Any = getattr(custom_graph_pass, "CustomPartitionerFn", object)


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
        """Return the forward and the backward graph of a joint graph."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        if not joint_inputs:  # a region that is compiled apart: nothing says which of its inputs are weights
            return divide(gm, joint_inputs, kwargs)
        results = kwargs["num_fwd_outputs"]
        exact = saved_bytes(divide(gm, joint_inputs, kwargs)[0].graph, results)
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameters = {placeholders[i] for i in kwargs.get("static_lifetime_input_indices") or ()}
        if self.options.tables and (bits := self.options.bits_for(Role.FACTOR, ())) is not None:
            merge(gm.graph, bits)
        roles = classify(gm.graph, parameters)
        pin(gm.graph, roles)
        nbytes, budget = 0, self.options.budget
        for less in range(8):
            annotate(roles, self.options, less)
            # Where nothing is rounded, torch's rules of what is too slow to compute again hold.
            with few_bit_costs(self.options) if is_any_rounded(roles) else torch_budget(self.options.recompute):
                forward, backward = divide(gm, joint_inputs, kwargs)
            nbytes = saved_bytes(forward.graph, results)
            if budget is None or nbytes <= budget:
                return self.finish(forward, backward, results, exact)
        raise FewbitError(f"1 bit for each value takes {nbytes:,} bytes, the budget is {budget:,}")

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
        choose_by_place(forward.graph, results, self.options)
        saved = rewrite(forward.graph, backward.graph, results, self.options)
        for module in (forward, backward):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
        return (forward, backward), GraphReport(tuple(saved), exact)
