"""What a training step keeps, beside the same step without fewbit: the lines and numbers of the callbacks."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..runtime.convert.api import revert
from ..runtime.memory.listing import size_text
from ..runtime.memory.peak import StorageTracker, no_collection
from ..runtime.plan.comparison import twin_of
from ..runtime.plan.seconds import step_seconds
from ..runtime.plan.static import static_bytes
from ..runtime.plan.step import Step
from ..runtime.tensors.traits import sum_of_squares
from ..tables import FewbitError

Batch = Mapping[str, Any] | tuple[Any, ...]
Loss = Callable[[Any], Tensor]
RUNS = 2  # timed steps of each, in turn, after one that compiles


@dataclass(frozen=True)
class Beside:
    """A step beside the exact one.

    Attributes:
        exact: bytes that the exact step keeps between its passes.
        error: relative error of the gradient.
        time: of a step, relative to the exact one.
        source: how error and time are known: predicted, or measured on some of the batch's samples.
        peak: of the exact step, as a plan's memory= counts it; None where it was not asked for.
    """

    exact: int
    error: float
    time: float
    source: str
    peak: int | None = None


@dataclass(frozen=True)
class Kept:
    """What a training step keeps, in bytes.

    Attributes:
        saved: between forward and backward pass, with the model's output.
        peak: most at once, with parameters, their gradients and the optimizer's state, as a plan's memory= counts it.
        beside: the exact step; None if it was not measured.
    """

    saved: int
    peak: int
    beside: Beside | None = None

    def __str__(self) -> str:
        now, near = f"keeps {size_text(self.saved)}", self.beside
        if near is None:
            return now
        time = f"{near.time:.2f}" if near.time < 10 else f"{near.time:.1f}"
        return f"{now} (exact {size_text(near.exact)}), error {near.error:.2g}, time ×{time} ({near.source})"


def kept(model: nn.Module, batch: Batch, loss: Loss | None = None, optimizer: Any = "adamw") -> Kept:
    """Return what a step on a batch keeps; gradients, buffers and the random state stay as they were."""
    step = _step(model, batch, loss)
    with step.apart(), no_collection(), StorageTracker() as tracker:
        number, output = step.forward()
        saved = tracker.living
        number.backward()
        del number, output
    try:
        fixed = static_bytes(model, optimizer).fixed
    except FewbitError:  # an optimizer that fewbit does not know, whose state is not there yet
        fixed = static_bytes(model, "sgd").fixed
    return Kept(saved, fixed + tracker.peak())


def exact_twin(model: nn.Module) -> nn.Module | None:
    """Return the model without fewbit, on the same parameters; None where none can be made, as of sharded parameters.

    Of several processes none measures: a model that is split among them cannot be run apart from the others.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return None
    with suppress(FewbitError):
        return revert(twin_of(model))
    return None


def beside_exact(model: nn.Module, exact: nn.Module, batch: Batch, loss: Loss | None, saved: int) -> Beside | None:
    """Measure a quarter of the batch's samples with the model and without fewbit.

    The whole batch may not fit exactly, which is why fewbit is there; what even a quarter of it needs may not be there
    either, and a user's loss may refuse fewer samples: then None is returned.

    Args:
        model: as it trains.
        exact: its `exact_twin`.
        batch, loss: as for `fewbit.plan`.
        saved: bytes that the model keeps of the whole batch.
    """
    whole = _step(model, batch, loss)
    count = max(1, whole.samples // 4)
    try:
        few = whole.with_samples(count)
        alone = replace(few, model=exact)
        bytes_exactly, gradient = _run(alone)
        bytes_now, other = _run(few)
        square = sum(map(sum_of_squares, gradient))
        error = (sum(sum_of_squares(b - a) for a, b in zip(gradient, other, strict=True)) / square) ** 0.5
        del gradient, other
        with few.apart():
            seconds: list[tuple[float, ...]] = [(step_seconds(alone), step_seconds(few)) for _ in range(RUNS)]
    except Exception:  # out of memory, or whatever a user's loss raises: only a line of the log depends on it
        return None
    once, now = (median_low(times) for times in zip(*seconds, strict=True))
    return Beside(round(saved * bytes_exactly / bytes_now), error, now / once, f"{count}/{whole.samples} samples")


def _step(model: nn.Module, batch: Batch, loss: Loss | None) -> Step:
    args, keywords = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
    return Step(model, args, keywords, loss)


def _run(step: Step) -> tuple[int, list[Tensor]]:
    """Return the bytes that a step keeps between its passes, and its gradient, by the random numbers that come next."""
    with step.apart(), no_collection(), StorageTracker() as tracker:
        loss, output = step.forward()
        saved = tracker.living
        found = torch.autograd.grad(loss, step.parameters, materialize_grads=True, allow_unused=True)
        del output
    return saved, [*found]
