"""Repeated training with several seeds: what few bits do to the losses, paired by seed.

        study = Study("gpt2", trainings)          one training per seed, the exact run first in each
    for comparison in study.comparisons(): verdict(comparison.gap)

The seed determines the weights and the batches. So exact runs of different seeds differ, and their losses form a band,
at every step from the lowest to the highest. Of a few-bit variant is counted at how many steps its loss, averaged over
the seeds, leaves that band. A shift smaller than the band can be real: runs of a seed have the same weights and
batches, so the differences to the exact run of the same seed, after the last step, say whether a variant ends as exact
training (plots/intervals.py).

The loss at a step is a mean over the preceding tenth of the steps, the same window as for the final loss.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from ...tables import FewbitError
from ..demo.runs import Run, Training, averaging_window, smoothed
from ..intervals import Interval, interval, verdict


@dataclass(frozen=True)
class Comparison:
    """Comparison of a variant's runs with the exact ones.

    Attributes:
        variant: its name.
        outside: distance of the mean loss from the band of the exact runs, at each step; 0 inside.
        validation_differences: validation loss minus that of the exact run of the same seed, one per seed.
    """

    variant: str
    outside: tuple[float, ...]
    validation_differences: tuple[float, ...]

    @property
    def steps_outside(self) -> int:
        """Number of steps at which the mean loss lies outside the band."""
        return sum(distance > 0 for distance in self.outside)

    @property
    def farthest_outside(self) -> float:
        """The largest distance of the mean loss from the band at any step."""
        return max(self.outside)

    @property
    def gap(self) -> Interval:
        """The mean difference over the seeds, with its interval."""
        return interval(self.validation_differences)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON; of per-step numbers only the largest and their count."""
        return {
            "variant": self.variant,
            "steps_outside": self.steps_outside,
            "farthest_outside": self.farthest_outside,
            "validation_differences": list(self.validation_differences),
            "validation_difference": self.gap.mean,
            "interval": self.gap.half if len(self.validation_differences) > 1 else None,
            "verdict": verdict(self.gap),
        }


@dataclass(frozen=True)
class Study:
    """Trainings that differ in their seed only.

    Attributes:
        model: name of the model, a key of `settings.SETTINGS`.
        trainings: one per seed; the same variants in each, the baseline first.

    Raises:
        FewbitError: there is no training, or the trainings have different variants or steps.
    """

    model: str
    trainings: tuple[Training, ...]

    def __post_init__(self) -> None:
        shapes = {tuple((run.variant, len(run.losses)) for run in training.runs) for training in self.trainings}
        if len(shapes) != 1 or not self.trainings[0].runs:
            raise FewbitError("a study needs trainings of the same variants and as many steps")

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants."""
        return tuple(run.variant for run in self.trainings[0].runs)

    def runs(self, variant: str) -> list[Run]:
        """Return the runs of `variant`, one per seed."""
        return [run for training in self.trainings for run in training.runs if run.variant == variant]

    def curves(self, variant: str) -> list[list[float]]:
        """Return the losses of `variant`, each a mean over a tenth of the steps up to it, one list per seed."""
        window = averaging_window(self.trainings[0].settings.steps)
        return [smoothed(run.losses, window) for run in self.runs(variant)]

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return a comparison of each other variant with the first.

        Raises:
            FewbitError: there is only one seed, so no spread.
        """
        if len(self.trainings) < 2:
            raise FewbitError("one seed has no spread: train with two or more")
        exact, *others = self.variants
        return tuple(self._compare(exact, other) for other in others)

    def _compare(self, exact: str, other: str) -> Comparison:
        losses = [run.validation_loss for run in self.runs(exact)]
        bands = zip(*self.curves(exact), strict=True)
        means = map(statistics.fmean, zip(*self.curves(other), strict=True))
        outside = [max(0.0, min(band) - mean, mean - max(band)) for band, mean in zip(bands, means, strict=True)]
        differences = [run.validation_loss - loss for run, loss in zip(self.runs(other), losses, strict=True)]
        return Comparison(other, tuple(outside), tuple(differences))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, with the comparisons if there are enough seeds."""
        comparisons = self.comparisons() if len(self.trainings) > 1 else ()
        return {
            "model": self.model,
            "comparisons": [comparison.to_dict() for comparison in comparisons],
            "trainings": [training.to_dict() for training in self.trainings],
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "study") -> "Study":
        """Return the study that `to_dict` serialised.

        Raises:
            FewbitError: `data` does not have that form; the message begins with `source`.
        """
        try:
            return cls(str(data["model"]), tuple(map(Training.from_dict, data["trainings"])))
        except (KeyError, TypeError, ValueError, FewbitError) as error:
            problem = error if isinstance(error, FewbitError) else "not what `fewbit plot training` writes"
            raise FewbitError(f"{source}: {problem}") from None
