"""A way to compute a step that changes its memory at every moment, not the life of one saved tensor.

A plan with it is solved for a trace of its own, beside the plan without it; what rounding does to the gradient stays
what it was. The planner goes through `WAYS_OF_STEPS` (__init__.py) and knows none of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Protocol

from torch import nn

from ..document import Choice
from ..known import Known
from ..recorder import trace
from ..seconds import Changed
from ..step import Step
from ..structure import structure_aside
from ..trace import Trace

# What lowers the least peak of a step by a smaller share is not worth another solution: no plan could gain more.
WORTH = 1 / 50


class Way(Protocol):
    """One way, exact but for the order of sums."""

    @property
    def method(self) -> str:
        """The method of its choices, one of `METHODS`."""
        ...

    @property
    def computes_again(self) -> bool:
        """Whether it repeats parts of the forward pass, which a plan with `recompute=False` may not."""
        ...

    def targets(self, known: Known, step: Step) -> Sequence[str]:
        """Return the modules that it would change, by name; none where it cannot save `WORTH`."""
        ...

    def carry_out(self, model: nn.Module, targets: Sequence[str]) -> None:
        """Change a model."""
        ...

    def seconds(self, known: Known, targets: Sequence[str]) -> float:
        """Return an estimate of what it adds to a step, where none can run."""
        ...

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
        ...

    def adapted(self, known: Known, targets: Sequence[str]) -> Known:
        """Return what is known of a step that is traced by this way, with the errors of what it saves anew."""
        ...


def known_by(ways: Sequence[Way], known: Known, step: Step, changed: Changed) -> Known | None:
    """Return what is known of a step that is computed by ways besides, traced once; None where they save nothing.

    Args:
        ways: one or several; None is returned where the last has nothing to change, too.
        known: of the step as it is, or by other ways.
        step: as it is.
        changed: changes the model by these others.
    """
    targets_of: dict[Way, tuple[str, ...]] = {}
    planned = known
    for way in ways:
        if targets := tuple(way.targets(planned, step)):
            targets_of[way] = targets
            choices = (Choice(name, way.method, None, 0, 0, 0.0, 0.0, 0.0) for name in targets)
            planned = replace(planned, changes=(*planned.changes, *choices))
    if ways[-1] not in targets_of:
        return None
    by_all = partial(_by, targets_of, step.model)
    try:
        with changed(), by_all():
            traced = trace(step)
    except Exception:  # a user's code may do anything with tensors that have no memory, such as logits
        return None
    if int(traced.base.max()) >= int(known.trace.base.max()):
        return None  # such as logits that something reads
    estimates = {way: way.seconds(known, targets) for way, targets in targets_of.items()}
    left, found = known.speeds.added(step, by_all, sum(estimates.values())), replace(known, trace=traced)
    for way, targets in targets_of.items():
        seconds = left if way is ways[-1] else min(left, estimates[way])
        choices = way.choices(step.model, targets, known.trace, traced, seconds)
        found = way.adapted(replace(found, changes=(*found.changes, *choices)), targets)
        left -= seconds
    return found


@contextmanager
def _by(targets_of: Mapping[Way, Sequence[str]], model: nn.Module) -> Iterator[None]:
    with structure_aside(model):
        for way, targets in targets_of.items():
            way.carry_out(model, targets)
        yield


def carry_out(ways: Iterable[Way], model: nn.Module, choices: Iterable[Choice]) -> None:
    """Change a model by those of the choices that are ways'."""
    by_method = {way.method: way for way in ways}
    own = (choice for choice in choices if choice.method in by_method)
    for method, group in groupby(own, key=lambda choice: choice.method):
        by_method[method].carry_out(model, [choice.target for choice in group])


def choices_of_batch(
    ways: Iterable[Way], model: nn.Module, changes: Iterable[Choice], before: Trace, after: Trace
) -> Iterator[Choice]:
    """Yield the choices of ways, of which each says what it saves in the step of another batch.

    Args:
        ways: all there are.
        model: of the step.
        changes: the choices for the batch that was measured.
        before, after: the step as it is, and by all these ways.
    """
    by_method = {way.method: way for way in ways}
    for method, group in groupby(changes, key=lambda choice: choice.method):
        own = [*group]
        seconds = sum(choice.seconds for choice in own)
        yield from by_method[method].choices(model, [choice.target for choice in own], before, after, seconds)
