"""The same training with several seeds: do few bits change its losses by less than another seed does?

    study = Study("gpt2", trainings)          one training a seed, the exact run first in each
    for comparison in study.comparisons(): comparison.within

A seed draws the weights and the batches. So exact runs of different seeds differ, and their losses make a band, at
every step from the lowest to the highest. A few-bit variant is *within the spread* if both hold:

    at every step        its loss, averaged over the seeds, lies in the band of the exact runs
    after the last step  its validation loss, averaged over the seeds, differs from the exact average by no more than
                         the standard deviation of the exact runs

A loss at a step is the mean over as many steps up to it as the final loss is averaged over, a tenth. Nothing widens the
band. It is a band of few runs, though, and a shift that is smaller than it can be real: of that, the differences from
the exact run of the same seed tell, which has the same weights and batches.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from ...tables import FewbitError
from .runs import Run, Training, averaging_window, smoothed


@dataclass(frozen=True)
class Comparison:
    """What a variant's runs are beside the exact ones.

    Attributes:
        variant: its name.
        outside: by how much the mean loss lies outside the band of the exact runs, at each step; 0 inside.
        validation_differences: validation loss less that of the exact run of the same seed, one a seed.
        validation_deviation: standard deviation of the exact runs' validation losses.
    """

    variant: str
    outside: tuple[float, ...]
    validation_differences: tuple[float, ...]
    validation_deviation: float

    @property
    def steps_outside(self) -> int:
        """Number of steps at which the mean loss lies outside the band."""
        return sum(distance > 0 for distance in self.outside)

    @property
    def farthest_outside(self) -> float:
        """The most by which the mean loss lies outside the band at any step."""
        return max(self.outside)

    @property
    def validation_difference(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.validation_differences)

    @property
    def within(self) -> bool:
        """Whether the variant is within the spread from seed to seed."""
        return not self.steps_outside and abs(self.validation_difference) <= self.validation_deviation

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, of those at each step the largest and how many there are."""
        return {
            "variant": self.variant,
            "steps_outside": self.steps_outside,
            "farthest_outside": self.farthest_outside,
            "validation_differences": list(self.validation_differences),
            "validation_difference": self.validation_difference,
            "validation_deviation": self.validation_deviation,
            "within": self.within,
        }


@dataclass(frozen=True)
class Study:
    """Trainings that differ in their seed only.

    Attributes:
        model: name of what was trained, a key of `settings.SETTINGS`.
        trainings: one a seed; in each the same variants, first the one that others are compared with.

    Raises:
        FewbitError: there is no training, or they are not of the same variants and steps.
    """

    model: str
    trainings: tuple[Training, ...]

    def __post_init__(self) -> None:
        shapes = {tuple((run.variant, len(run.losses)) for run in training.runs) for training in self.trainings}
        if len(shapes) != 1 or not self.trainings[0].runs:
            raise FewbitError("a study needs trainings of the same variants and as many steps")

    @property
    def variants(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(run.variant for run in self.trainings[0].runs)

    def runs(self, variant: str) -> list[Run]:
        """Return the runs of `variant`, one a seed."""
        return [run for training in self.trainings for run in training.runs if run.variant == variant]

    def curves(self, variant: str) -> list[list[float]]:
        """Return the training losses of `variant` at each step, averaged over the last tenth, one list a seed."""
        window = averaging_window(self.trainings[0].settings.steps)
        return [smoothed(run.losses, window) for run in self.runs(variant)]

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return how each variant but the first compares with the first.

        Raises:
            FewbitError: there is one seed only, which has no spread.
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
        return Comparison(other, tuple(outside), tuple(differences), statistics.stdev(losses))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON; the comparisons too, where there are seeds enough."""
        comparisons = self.comparisons() if len(self.trainings) > 1 else ()
        return {
            "model": self.model,
            "comparisons": [comparison.to_dict() for comparison in comparisons],
            "trainings": [training.to_dict() for training in self.trainings],
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "study") -> "Study":
        """Return the study that `to_dict` told.

        Raises:
            FewbitError: it told none; the message begins with `source`.
        """
        try:
            return cls(str(data["model"]), tuple(map(Training.from_dict, data["trainings"])))
        except (KeyError, TypeError, ValueError, FewbitError) as error:
            told = error if isinstance(error, FewbitError) else "not what `fewbit plot training` writes"
            raise FewbitError(f"{source}: {told}") from None
