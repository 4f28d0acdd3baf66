"""What is known of a step when its plan is solved, and what a way to save its tensors is.

    way.measure     what it does to the gradient          (or way.estimate, for a model without values)
    way.options     what it holds, saves and takes, for each tensor or module that it can serve
    way.carry_out   changes the model as the chosen options say; tensors by their place are left to hooks (fitted.py)

A `WayToSave` offers options for one problem. The ways are in ways/, which also lists them; nothing else knows which
there are. Ways to compute a step are in ways/steps.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..convert.api import convert_beside
from .document import Choice
from .errors import Errors, Trial
from .places import without_numbers
from .problem import GROUPS, Hold, Option, Problem
from .seconds import Speeds
from .step import Step
from .trace import Trace, Traced, codes_bytes

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

    def configs(self, choice: Choice) -> tuple[Any, ...]:
        """Return the configs of `convert` that carry out a choice, equal ones for equal choices: by default there is
        none, and hooks save by the choice's place (fitted.py)."""
        return ()

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Change a model as those choices say that are of its methods: what is of equal configs together."""
        converted: dict[tuple[Any, ...], list[str]] = {}
        for choice in choices:
            converted.setdefault(self.configs(choice), []).append(choice.target)
        for configs, names in converted.items():
            if configs:
                convert_beside(model, *configs, include=names)


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
    # As of a compiled step.
    recompute: ClassVar[float] = 1.0
    recompute_seconds: ClassVar[float] = 0.0
    host_memory: ClassVar[int | None] = None

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
