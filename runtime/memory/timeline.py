"""The memory of a training step at each of its moments, and which module runs then.

A moment is the number of storages made, resized or freed before it, as `peak.StorageTracker` records them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .peak import Peak, StorageTracker, recorded_step

Event = Literal["enter", "leave", "backward"]


@dataclass(frozen=True)
class Mark:
    """A module's forward pass begins or ends, or its backward pass begins: the gradient of its output is there.

    Attributes:
        moment: when.
        module: its qualified name; "" for the model.
        event: "enter", "leave" or "backward".
    """

    moment: int
    module: str
    event: Event


@dataclass(frozen=True)
class Timeline:
    """The memory of one step.

    Attributes:
        levels: int64, bytes after each moment, without the gradients of parameters.
        marks: in order.
        backward: the moment at which the backward pass begins.
        peak: of the step.
    """

    levels: NDArray[np.int64]
    marks: tuple[Mark, ...]
    backward: int
    peak: Peak


def timeline_of_step(model: nn.Module, *inputs: object, **keywords: object) -> Timeline:
    """Run `model(*inputs, **keywords)` and its backward pass once, as `peak_of_step` does; return their memory.

    Example:
        timeline = fewbit.memory.timeline_of_step(model, x)
        timeline.levels.max() == timeline.peak.bytes
    """
    marks: list[Mark] = []
    with recorded_step(model, inputs, keywords, lambda tracker: _marking(model, tracker, marks)) as step:
        levels = step.tracker.levels(but=step.gradients)
        return Timeline(levels, tuple(marks), step.backward, step.peak)


@contextmanager
def _marking(model: nn.Module, tracker: StorageTracker, marks: list[Mark]) -> Iterator[None]:
    """Note in `marks` what the modules do in this block. A module that a checkpoint runs again is noted again."""

    def note(name: str, event: Event) -> Callable[..., None]:
        return lambda *_: marks.append(Mark(len(tracker.events), name, event))

    def left(name: str) -> Callable[..., None]:
        leave, backward = note(name, "leave"), note(name, "backward")

        def hook(_: nn.Module, __: object, output: Any) -> None:
            leave()
            # A hook of a tensor, not of the module: that would put nodes of its own into the graph.
            made = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None)
            first = next(made, None)
            if first is not None:
                first.register_hook(backward)

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(note(name, "enter")).remove)
            stack.callback(module.register_forward_hook(left(name)).remove)
        yield
