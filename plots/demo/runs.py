"""Results of trainings: plain numbers, from which tables, figures and files are made without torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .settings import Settings, Size

POINTS = 10  # of a training loss that a summary stores


@dataclass(frozen=True)
class Run:
    """Results of one training run.

    Attributes:
        variant: name of the variant, such as ``3 bits``.
        losses: training loss at each step, before the update, in nats per character.
        seconds: time of each step: forward, backward and update.
        validation_loss: after the last step, on text that was not trained on, in nats per character.
        activation_bytes: bytes that the activations save for backward in one step.
        saved_bytes: bytes that the whole model and its loss save for backward in one step.
    """

    variant: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    validation_loss: float
    activation_bytes: int
    saved_bytes: int

    @property
    def final_loss(self) -> float:
        """Final training loss: the mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-averaging_window(len(self.losses)) :])

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, including those of the properties."""
        return {**asdict(self), "final_loss": self.final_loss, "step_seconds": self.step_seconds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Run":
        """Return the run that `to_dict` serialised; raises KeyError, TypeError or ValueError for another form."""
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
    """Runs that differ in one setting only.

    Attributes:
        settings: shared by the runs.
        unigram_entropy: of the validation text, in nats per character: the loss of a model of character frequencies
            alone. A reference: a lower loss means that the model uses context.
        runs: one per variant.
    """

    settings: Settings
    unigram_entropy: float
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        return {**asdict(self), "runs": [run.to_dict() for run in self.runs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Training":
        """Return the training that `to_dict` serialised; raises KeyError, TypeError or ValueError for another form."""
        settings = Settings(**{**data["settings"], "size": Size(**data["settings"]["size"])})
        return cls(settings, float(data["unigram_entropy"]), tuple(map(Run.from_dict, data["runs"])))


def averaging_window(steps: int) -> int:
    """Return the number of steps over which the final loss is averaged: a tenth of them, at least one."""
    return max(1, steps // 10)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return, for each step, the mean of the last `window` losses up to it; of fewer at the start."""
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def summary(run: Run, seed: int) -> dict[str, Any]:
    """Return a run of a seed for JSON, with ten points of its training loss."""
    steps = len(run.losses)
    every = max(1, steps // POINTS)
    losses = smoothed(run.losses, averaging_window(steps))
    return {
        "variant": run.variant,
        "seed": seed,
        "losses": [round(loss, 4) for loss in losses[every - 1 :: every]],
        "validation_loss": run.validation_loss,
        "saved_bytes": run.saved_bytes,
    }
