"""Ways to compute a step, exact but for the order of sums: the loss in chunks of tokens, and MLPs in tiles of tokens.

A plan by a way is solved for a trace of its own, beside the plan without it; what rounding does to the gradient stays
what it was. `WAYS_OF_STEPS` lists the ways; nothing else knows which there are.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from ...convert.api import convert_beside
from ...convert.chunked_loss import ChunkedLoss, why_not
from ...saved.checkpoint import blocks_of
from ...saved.tiles import computes_by_token, tile_size, tiled_forward, width_of
from ..document import Choice
from ..errors import Errors
from ..known import Known
from ..places import within
from ..problem import CHUNKED, GROUPS, RECOMPUTE, TILED
from ..seconds import Changed
from ..step import Step
from ..structure import is_converted, structure_aside
from ..trace import Trace, trace

# What lowers the least peak of a step by a smaller share is not worth another solution: no plan could gain more.
WORTH = 1 / 50


class Way(ABC):
    """One way to compute a step, exact but for the order of sums.

    Attributes:
        method: of its choices, one of `METHODS`.
        computes_again: whether it repeats parts of the forward pass, which a plan with `recompute=False` may not.
        in_graphs: whether the backend fewbit computes it in its graphs, too.
    """

    method: ClassVar[str]
    computes_again: ClassVar[bool] = False
    in_graphs: ClassVar[bool] = False

    @abstractmethod
    def targets(self, known: Known, step: Step) -> Sequence[str]:
        """Return the modules that it would change, by name; none where it cannot save `WORTH`."""

    @abstractmethod
    def carry_out(self, model: nn.Module, targets: Sequence[str]) -> None:
        """Change a model."""

    def may_lower(self, known: Known, targets: Sequence[str]) -> bool:
        """Return whether the step may take less at its largest moment, as far as can be told without tracing it."""
        return True

    def seconds(self, known: Known, targets: Sequence[str]) -> float:
        """Return an estimate of what it adds to a step, where none can run: by default nothing is computed twice."""
        return 0.0

    @abstractmethod
    def choices(
        self, model: nn.Module, targets: Sequence[str], before: Trace, after: Trace, seconds: float
    ) -> Iterator[Choice]:
        """Yield a choice for each target.

        Args:
            model: of the step.
            targets: names of modules.
            before, after: the step without this way and with it.
            seconds: that it adds to a step.
        """

    def adapted(self, known: Known, targets: Sequence[str]) -> Known:
        """Return what is known of a step that is traced by this way, with the errors of what it saves anew: by default
        there is nothing else."""
        return known


class ChunkedLossWay(Way):
    """Heads of language models whose logits and loss are computed over chunks of tokens."""

    method = CHUNKED
    in_graphs = True

    def targets(self, known: Known, step: Step) -> Sequence[str]:
        """Return the Linear layers that make logits worth the while: the model's own heads, or else the last layer."""
        model, traced = step.model, known.trace
        found = [each for each in ChunkedLoss().candidates(model) if isinstance(each.current, nn.Module)]
        names = [each.name for each in found if each.name in traced.calls]
        if not found:
            modules = dict(model.named_modules())
            layers = [name for name in traced.calls if name and type(modules.get(name)) is nn.Linear]
            names = [max(layers, key=lambda name: traced.calls[name][-1].start)] if layers else []
        modules = [model.get_submodule(name) for name in names]
        usable = all(name and len(traced.calls[name]) == 1 for name in names) and not any(map(why_not, modules))
        largest = 0  # of the logits, in float32
        for name, module in zip(names, modules, strict=True):
            for x in traced.inputs.get(name, ()):
                largest = max(largest, 4 * prod(x.shape[:-1]) * getattr(module, "out_features", 0))
        return tuple(names) if usable and largest > WORTH * int(traced.base.max()) else ()

    def carry_out(self, model: nn.Module, targets: Sequence[str]) -> None:
        """Compute the loss of the logits of these Linear layers in chunks."""
        convert_beside(model, ChunkedLoss(heads=tuple(targets)), include=targets)

    def choices(
        self, model: nn.Module, targets: Sequence[str], before: Trace, after: Trace, seconds: float
    ) -> Iterator[Choice]:
        """Yield a choice for each head, of which the first says what all of them save."""
        now = 0  # of the gradients that wait for the backward pass, of hidden states and what learns of a head
        for name in targets:
            now += sum(prod(x.shape) * x.dtype.itemsize for x in after.inputs.get(name, ()) if x.requires_grad)
            now += sum(p.nbytes for p in model.get_submodule(name).parameters() if p.requires_grad)
        exact = now + max(0, int(before.base[before.backward] - after.base[after.backward]))
        sizes = [(exact, now, seconds), *[(0, 0, 0.0)] * (len(targets) - 1)]
        for head, (a, b, s) in zip(targets, sizes, strict=True):
            yield Choice(head, CHUNKED, None, a, b, 0.0, 0.0, s)


class Tiles(Way):
    """MLPs, and adapted projections, over tiles of tokens: for long contexts, which peak inside of them.

    What such a module makes of a tile is there at once, in both passes, and its forward pass is computed once more in
    the backward pass (saved/tiles.py). What it saves is its input, a tensor like any other: exact, in codes, or made
    again with its block.
    """

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
        # What is called once, outermost first, but blocks and what holds these last.
        once = [(name, spans[0]) for name, spans in traced.calls.items() if len(spans) == 1]
        holds = {name: any(within(block, name) for block in blocks) for name, _ in once}
        once.sort(key=lambda each: (holds[each[0]], each[1].start, -each[1].end))
        with step.apart():
            for name, _ in once:
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


# ---- all of them -----------------------------------------------------------------------------------------------------


# In the order in which they are tried, each beside those before it: what costs no time comes first.
WAYS_OF_STEPS: tuple[Way, ...] = (ChunkedLossWay(), Tiles())
_BY_METHOD = {way.method: way for way in WAYS_OF_STEPS}


def targets_by_way(
    ways: Iterable[Way], known: Known, step: Step
) -> tuple[dict[Way, tuple[str, ...]], tuple[Choice, ...]]:
    """Return what each way would change of a step, beside those before it, and choices that say so without sizes."""
    targets_of: dict[Way, tuple[str, ...]] = {}
    planned = known
    for way in ways:
        if targets := tuple(way.targets(planned, step)):
            targets_of[way] = targets
            choices = (Choice(name, way.method, None, 0, 0, 0.0, 0.0, 0.0) for name in targets)
            planned = replace(planned, changes=(*planned.changes, *choices))
    return targets_of, planned.changes[len(known.changes) :]


def known_by(way: Way, known: Known, step: Step, changed: Changed) -> Known | None:
    """Return what is known of a step that is computed by a way besides; None where it changes or saves nothing.

    Args:
        way: the further one.
        known: of the step as it is, or by other ways.
        step: as it is.
        changed: changes the model by these others.
    """
    targets = tuple(way.targets(known, step))
    if not targets or not way.may_lower(known, targets):
        return None

    @contextmanager
    def by_it() -> Iterator[None]:
        with structure_aside(step.model):
            way.carry_out(step.model, targets)
            yield

    try:
        with changed(), by_it():
            traced = trace(step)
    except Exception:  # a user's code may do anything with tensors that have no memory, such as logits
        return None
    if int(traced.base.max()) >= int(known.trace.base.max()):
        return None  # such as logits that something reads
    seconds = known.speeds.added(step, by_it, way.seconds(known, targets))
    choices = way.choices(step.model, targets, known.trace, traced, seconds)
    return way.adapted(replace(known, trace=traced, changes=(*known.changes, *choices)), targets)


def carry_out(model: nn.Module, choices: Iterable[Choice]) -> None:
    """Change a model by those of the choices that are ways'."""
    own = (choice for choice in choices if choice.method in _BY_METHOD)
    for method, group in groupby(own, key=lambda choice: choice.method):
        _BY_METHOD[method].carry_out(model, [choice.target for choice in group])


def choices_of_batch(model: nn.Module, changes: Iterable[Choice], before: Trace, after: Trace) -> Iterator[Choice]:
    """Yield the choices of ways, of which each says what it saves in the step of another batch.

    Args:
        model: of the step.
        changes: the choices for the batch that was measured.
        before, after: the step as it is, and by all these ways.
    """
    for method, group in groupby(changes, key=lambda choice: choice.method):
        own = [*group]
        seconds = sum(choice.seconds for choice in own)
        yield from _BY_METHOD[method].choices(model, [choice.target for choice in own], before, after, seconds)
