"""Means of paired differences with their confidence intervals: the rule by which a result of an experiment counts.

    interval([.1, .2, .15])          mean ± half the 95 % interval of Student's t
    interval([…]).counts             whether the interval leaves out zero

The seed of a run determines its weights and batches, so runs of one seed are compared with each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and the interval in which it lies with a probability of `LEVEL`.

    Attributes:
        mean: of the values.
        half: half the width of the interval; infinite for a single value.
        count: number of values.
    """

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    @property
    def counts(self) -> bool:
        """Whether the mean differs from zero by more than chance: the interval leaves out zero."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values with its interval."""
    from scipy.stats import t

    if len(values) < 2:
        return Interval(fmean(values), float("inf"), len(values))
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return Interval(fmean(values), half, len(values))


def differences(
    rows: Sequence[Mapping[str, Any]], is_exact: Callable[[Mapping[str, Any]], bool], pair: Sequence[str], value: str
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each row that is not exact, and its value less that of the exact row that it is paired with.

    Args:
        rows: of an experiment; rows whose exact one is missing are left out.
        is_exact: whether a row is of an exact run.
        pair: keys that have the same values in both rows of a pair, such as the seed.
        value: key of the value.
    """
    exact = {tuple(row[key] for key in pair): row[value] for row in rows if is_exact(row)}
    for row in rows:
        key = tuple(row[name] for name in pair)
        if not is_exact(row) and key in exact:
            yield row, row[value] - exact[key]
