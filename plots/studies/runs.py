"""What a training leaves behind: numbers only, so that tables, figures and files are made without torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .settings import Settings, Size


@dataclass(frozen=True)
class Run:
    """One model, trained.

    Attributes:
        variant: name of what was trained, such as ``3 bits``.
        losses: training loss at each step, before the step was taken; nats a character.
        seconds: time of each step: forward, backward and update.
        validation_loss: after the last step, on text that was not trained on; nats a character.
        activation_bytes: what the activations keep for backward in one step.
        saved_bytes: what the whole model and its loss keep for backward in one step.
    """

    variant: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    validation_loss: float
    activation_bytes: int
    saved_bytes: int

    @property
    def final_loss(self) -> float:
        """Training loss at the end: the mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-averaging_window(len(self.losses)) :])

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, those of the properties too, for JSON."""
        return {**asdict(self), "final_loss": self.final_loss, "step_seconds": self.step_seconds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Run":
        """Return the run that `to_dict` told; raises KeyError, TypeError or ValueError if it told none."""
        return cls(
            str(data["variant"]),
            tuple(map(float, data["losses"])),
            tuple(map(float, data["seconds"])),
            float(data["validation_loss"]),
            int(data["activation_bytes"]),
            int(data["saved_bytes"]),
        )


@dataclass(frozen=True)
class Training:
    """Runs that differ in one thing only.

    Attributes:
        settings: shared by the runs.
        unigram_entropy: of the validation text, nats a character: the loss of who knows how often each occurs, and no
            more. A yardstick: what a model does better than that, it has learnt from context.
        runs: one a variant.
    """

    settings: Settings
    unigram_entropy: float
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        return {**asdict(self), "runs": [run.to_dict() for run in self.runs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Training":
        """Return the training that `to_dict` told; raises KeyError, TypeError or ValueError if it told none."""
        settings = Settings(**{**data["settings"], "size": Size(**data["settings"]["size"])})
        return cls(settings, float(data["unigram_entropy"]), tuple(map(Run.from_dict, data["runs"])))


def averaging_window(steps: int) -> int:
    """Return over how many steps the final loss is averaged: a tenth of them, at least one."""
    return max(1, steps // 10)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return, for each step, the mean of the last `window` losses up to it; of fewer at the start."""
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]
