"""What is known of a step when its plan is solved, and what a way to save its tensors, or to compute it, is.

    way.measure     what it does to the gradient          (or way.estimate, for a model without values)
    way.options     what it holds, saves and takes, for each tensor or module that it can serve
    way.carry_out   changes the model as the chosen options say; tensors by their place are left to hooks (fitted.py)

A `WayToSave` offers options for one problem. A `Way` changes the memory of a step at every moment: a plan with it is
solved for a trace of its own, beside the plan without it; what rounding does to the gradient stays what it was. The
ways are in ways/, a file each, which also lists them; nothing else knows which there are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..convert.api import convert_beside
from .document import Choice
from .errors import Errors, Trial
from .places import without_numbers
from .problem import GROUPS, Hold, Option, Problem
from .recorder import trace
from .seconds import Changed, Speeds
from .step import Step
from .structure import structure_aside
from .trace import Trace, Traced, codes_bytes

# What lowers the least peak of a step by a smaller share is not worth another solution: no plan could gain more.
WORTH = 1 / 50
ErrorsOfMethods = Mapping[str, Mapping[str, Errors]]  # by method, and by target: a place, or the name of a module


class WayToSave(ABC):
    """A way to have again in the backward pass what a step saves: its `options`, and what they do to the gradient.

    Attributes:
        methods: of its options, among `METHODS`.
    """

    methods: ClassVar[tuple[str, ...]]

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return what its options do to the gradient: by default nothing.

        Args:
            step: of the whole batch.
            trace: of this step.
            trial: of some samples of it, whose gradients tell.
        """
        return {}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return an estimate of the same from shapes.

        Args:
            step: on the meta device.
            trace: of this step.
            of_tensors: the estimated errors of each saved tensor in groups, by its place.
        """
        return {}

    @abstractmethod
    def options(self, known: "Known", step: Step) -> Iterator[Option]:
        """Yield its options."""

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Change a model as those choices say that are of its methods: by default not, and hooks save by their places
        (fitted.py)."""
        return


def kind_of(tensor: Traced) -> str:
    """Return the same text for the same tensors of equal layers, whose names differ in numbers."""
    return f"{without_numbers(tensor.place)} {tensor.function} {tensor.shape} {tensor.dtype}"


@dataclass(frozen=True)
class Known:
    """What is known of a step.

    Attributes:
        trace: memory and lives.
        ways: to save its tensors.
        errors: of each of their methods, by target, where that is known.
        speeds: of the machine.
        changes: what is done to the model in the traced step, for the plan.
    """

    trace: Trace
    ways: tuple[WayToSave, ...]
    errors: Mapping[str, Mapping[str, Errors]]
    speeds: Speeds
    changes: tuple[Choice, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Of each tensor, the same text for those of equal layers."""
        return [kind_of(x) for x in self.trace.tensors]

    @property
    def taken(self) -> float:
        """Of the time of an exact step, the share that `changes` add."""
        return sum(choice.seconds for choice in self.changes) / max(self.speeds.step, 1e-9)

    @property
    def gradients(self) -> NDArray[np.int64]:
        """Bytes of the parameters' gradients at each moment."""
        return self.trace.gradients

    @property
    def left(self) -> int:
        """Bytes that stay after the step besides the gradients."""
        return self.trace.left

    @property
    def backward(self) -> int:
        """The moment at which the backward pass begins."""
        return self.trace.backward

    def of(self, method: str) -> Mapping[str, Errors]:
        """Return the errors of one method by target."""
        return self.errors.get(method, {})

    def in_codes(self, i: int, bits: int, nbytes: int, method: str = GROUPS, itemsize: int = 4) -> Option:
        """Return the option to save a tensor, whose errors are known, in so many bytes of codes of a method."""
        x, errors = self.trace.tensors[i], self.of(method)[self.trace.tensors[i].place]
        costs = errors.noise[bits], errors.bias[bits], self.speeds.codes(x.elements, bits, itemsize, method)
        return Option(method, x.place, bits, (i,), (Hold(x.saved, x.freed, nbytes),), nbytes, *costs)

    def in_groups(self, i: int, bits: int) -> Option | None:
        """Return the option to save a tensor in groups; None if its error is not known, or codes take no less."""
        x = self.trace.tensors[i]
        errors = self.of(GROUPS).get(x.place)
        nbytes = codes_bytes(x.shape, x.dtype, x.features, bits, x.function)
        if errors is None or bits not in errors.noise or nbytes >= x.nbytes:
            return None
        return self.in_codes(i, bits, nbytes, itemsize=x.dtype.itemsize)

    def uniform(self, bits: int) -> list[Option]:
        """Return the options to save each tensor in groups of so many bits an element, where that saves bytes."""
        found = (self.in_groups(i, bits) for i in range(len(self.trace.tensors)))
        return [option for option in found if option is not None]

    def problem(self, step: Step, fixed: int) -> Problem:
        """Return the planner's problem.

        Args:
            step: what was measured.
            fixed: bytes that are there throughout.
        """
        options = tuple(option for way in self.ways for option in way.options(self, step))
        return Problem(len(self.trace.tensors), options, self.trace.base, fixed, self.speeds.step)

    def moment(self, at: int) -> str:
        """Return where in the step a moment lies, in words."""
        if at < self.trace.backward:
            calls = [(span, name) for name, spans in self.trace.calls.items() for span in spans]
            inside = [(span.end - span.start, name) for span, name in calls if span.start <= at < span.end]
            return f"in the forward pass of {min(inside)[1] or 'the model'}" if inside else "after the forward pass"
        ahead = [(x.freed, x.module) for x in self.trace.tensors if x.freed >= at]
        return f"in the backward pass of {min(ahead)[1] or 'the model'}" if ahead else "after the backward pass"


def convert_chosen(model: nn.Module, choices: Sequence[Choice], config: Callable[[Choice], Any]) -> None:
    """Convert the modules that choices name, those of one config together.

    Args:
        model: changed in place.
        choices: by modules.
        config: returns the config of `convert` that a choice stands for; equal choices have equal ones.
    """
    converted: dict[Any, list[str]] = {}
    for choice in choices:
        converted.setdefault(config(choice), []).append(choice.target)
    for method, names in converted.items():
        convert_beside(model, method, include=names)


# ---- ways to compute a step ------------------------------------------------------------------------------------------


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
