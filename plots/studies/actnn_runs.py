"""Results of the trainings of actnn.py: plain numbers, from which tables, figures and files are made without torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...tables import FewbitError
from ..demo.runs import averaging_window, smoothed


@dataclass(frozen=True)
class Trained:
    """Results of one training run.

    Attributes:
        task, variant: names.
        seed: of weights and batches.
        losses: training loss at each step, before the step was taken.
        seconds: time of each step: forward, backward and update.
        validation_loss: after the last step, on data that was not trained on.
        accuracy: share of that data that is classified correctly.
        saved_bytes: bytes that the model keeps for backward in one step, without the loss.
    """

    task: str
    variant: str
    seed: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    validation_loss: float
    accuracy: float
    saved_bytes: int


@dataclass(frozen=True)
class Evidence:
    """All runs: the same variants for each task, the exact one first, and the same seeds.

    Attributes:
        runs: in any order.
        block_ratios: factor by which a chain of Conv–BN–ReLU keeps less, by bits.
    """

    runs: tuple[Trained, ...]
    block_ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(run.task for run in self.runs))

    def variants(self, task: str) -> list[str]:
        """Return the names of the variants, in order."""
        return list(dict.fromkeys(run.variant for run in self.runs if run.task == task))

    def of(self, task: str, variant: str) -> list[Trained]:
        """Return the runs, one per seed."""
        return sorted((r for r in self.runs if (r.task, r.variant) == (task, variant)), key=lambda run: run.seed)

    def curves(self, task: str, variant: str) -> list[list[float]]:
        """Return the training losses, each averaged over a tenth of the steps up to it, one list per seed."""
        return [smoothed(run.losses, averaging_window(len(run.losses))) for run in self.of(task, variant)]

    def differences(self, task: str, variant: str) -> list[float]:
        """Return validation losses minus those of the first variant with the same seed."""
        exact = {run.seed: run.validation_loss for run in self.of(task, self.variants(task)[0])}
        return [run.validation_loss - exact[run.seed] for run in self.of(task, variant)]

    def step_seconds(self, task: str, variant: str) -> float:
        """Return the median time of a step."""
        return statistics.median(second for run in self.of(task, variant) for second in run.seconds)

    def ratio(self, task: str, variant: str) -> float:
        """Return the factor by which this variant keeps less for backward than the first."""
        exact, other = self.of(task, self.variants(task)[0])[0], self.of(task, variant)[0]
        return exact.saved_bytes / other.saved_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        return {
            "block_ratios": dict(self.block_ratios),
            "runs": [asdict(run) for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "evidence") -> "Evidence":
        """Return the evidence that `to_dict` serialised.

        Raises:
            FewbitError: `data` does not have that form; the message begins with `source`.
        """
        try:
            runs = tuple(_trained(run) for run in data["runs"])
            return cls(runs, dict(data["block_ratios"]))
        except (KeyError, TypeError, ValueError):
            raise FewbitError(f"{source}: not what `fewbit plot training --method actnn` writes") from None


def _trained(data: Mapping[str, Any]) -> Trained:
    def numbers(values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(map(float, values))

    return Trained(
        *(str(data["task"]), str(data["variant"]), int(data["seed"])),
        *(numbers(data["losses"]), numbers(data["seconds"])),
        *(float(data["validation_loss"]), float(data["accuracy"]), int(data["saved_bytes"])),
    )
