"""MLPs, and adapted projections, over tiles of tokens: exact, for long contexts, which peak inside of them.

What such a module makes of a tile is there at once, in both passes, and its forward pass is computed once more in the
backward pass (saved/tiles.py). What it saves is its input, a tensor like any other: exact, in codes, or made again with
its block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import nn

from ...saved.by_token import computes_by_token
from ...saved.checkpoint import blocks_of
from ...saved.tiles import tile_size, tiled_forward, width_of
from ..document import Choice
from ..errors import Errors
from ..known import WORTH, Known, Way
from ..places import within
from ..problem import GROUPS, RECOMPUTE, TILED
from ..step import Step
from ..structure import is_converted
from ..trace import Trace


class Tiles(Way):
    """Modules that compute a row for each token, and make so much of them that a tile is worth the while."""

    method = TILED
    computes_again = True

    def targets(self, known: Known, step: Step) -> Sequence[str]:
        """Return the outermost modules of several layers that take tokens by themselves, and make much of them.

        A module that makes less than a fiftieth of the peak is not where the peak is. A block is taken whole only if
        no part of it is: computed again with its MLP in tiles, it needs less.
        """
        traced, found, blocks = known.trace, list[str](), blocks_of(step.model)
        # About the peak of a step without what is behind its blocks, such as logits, which another way avoids.
        end = max((span.end for b in blocks for span in traced.calls.get(b, ())), default=len(traced.base))
        least = WORTH * (int(traced.base[:end].max()) + int(traced.gradients[-1]))
        taken = {choice.target for choice in known.changes}
        with step.apart():
            for name in _in_order(blocks, traced):
                given = traced.inputs.get(name, ())
                if not name or len(given) != 1 or len(given[0].shape) < 2:
                    continue  # the model itself, or what takes more than one tensor of tokens
                (x,), near = given, any(within(name, f) or within(f, name) for f in found)
                if near or any(within(each, name) for each in taken):
                    continue
                module, tokens, features = step.model.get_submodule(name), prod(x.shape[:-1]), x.shape[-1]
                made = tokens * width_of(module) * x.dtype.itemsize
                if made < least or tile_size(module, tokens, features) >= tokens:
                    continue
                if not any(True for _ in module.children()) or "forward" in vars(module) or is_converted(module):
                    continue
                if computes_by_token(module, torch.empty(features, dtype=x.dtype, device=step.device)):
                    found.append(name)
        return found

    def carry_out(self, model: nn.Module, targets: Sequence[str]) -> None:
        """Let these modules take tiles of tokens."""
        for name in targets:
            module = model.get_submodule(name)
            vars(module)["forward"] = tiled_forward(module)

    def may_lower(self, known: Known, targets: Sequence[str]) -> bool:
        """Return whether the most memory is taken within these modules, or in the backward pass.

        Of the forward pass of the others nothing changes; to trace all tiles of an 8B takes a third of `fewbit.fits`.
        """
        base, backward = known.trace.base, known.trace.backward
        elsewhere = np.ones(backward, bool)
        for name in targets:
            for span in known.trace.calls[name]:
                elsewhere[span.start : span.end + 1] = False
        return int(base[:backward].max(where=elsewhere, initial=0)) < int(base.max())

    def seconds(self, known: Known, targets: Sequence[str]) -> float:
        """Return that of their forward passes, which are computed twice."""
        return sum(known.speeds.forward(name) for name in targets)

    def choices(
        self, model: nn.Module, targets: Sequence[str], before: Trace, after: Trace, seconds: float
    ) -> Iterator[Choice]:
        """Yield a choice for each module; its input is saved besides, by a choice of its own."""
        for name in targets:
            saved = sum(x.nbytes for x in before.tensors if all(within(user, name) for user in x.users))
            own = sum(x.nbytes for x in after.tensors if all(within(user, name) for user in x.users))
            yield Choice(name, TILED, None, max(0, saved - own), 0, 0.0, 0.0, seconds / len(targets))

    def adapted(self, known: Known, targets: Sequence[str]) -> Known:
        """Return it with the errors of inputs in codes: those of computing the modules again from them."""
        blocks, errors = known.of(RECOMPUTE), dict[str, Errors]()
        for x in known.trace.tensors:
            if x.module in targets and x.module in blocks:
                errors[x.place] = blocks[x.module]
        return replace(known, errors={**known.errors, GROUPS: {**known.of(GROUPS), **errors}})


def _in_order(blocks: Sequence[str], traced: Trace) -> list[str]:
    """Return the names of the modules that are called once, outermost first, but blocks and what holds these last."""
    once = [(name, spans[0]) for name, spans in traced.calls.items() if len(spans) == 1]
    holds_blocks = {name: any(within(block, name) for block in blocks) for name, _ in once}
    return [name for name, span in sorted(once, key=lambda each: (holds_blocks[each[0]], each[1].start, -each[1].end))]
