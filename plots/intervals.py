"""The statistics of all pages: paired differences by seed, their intervals, and the words for what they show.

    interval([.1, .2, .15])                    mean ± half the 95 % interval of Student's t
    interval([…]).counts                       whether the interval leaves out zero
    by_seed([(0, .1), (0, .3), (1, .2)])       [.2, .2]: several tasks of a seed are one observation
    holm(intervals)                            which of them leave out zero after correction for their number
    verdict(interval, margin)                  "above", "below", "equal" or "undecided"

The seed of a run determines its weights and batches, so runs of one seed are compared with each other. Tasks of a seed
share its weights or order of batches: pooled as if independent they made intervals up to half too narrow (±.66 points
in place of ±1.12 for L3 in finetuning.json). That an interval holds zero shows no equality; that it lies within a
margin which was fixed before the run does.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

LEVEL = 0.95

# Of a validation loss in nats, for "equal": what weights changed by a millionth move it by in 600 steps (0.02 to 0.05).
# Fixed on 25 November 2026: runs before that were not registered with it.
MARGIN = 0.02


@dataclass(frozen=True)
class Interval:
    """A mean, and the interval in which it lies with a probability of `LEVEL`.

    Attributes:
        mean: of the values.
        half: half the width of the interval; infinite for a single value.
        count: number of values.
        p: probability of a mean as far from zero or farther, if chance alone moves it; 1 for a single value.
    """

    mean: float
    half: float
    count: int
    p: float = 1.0

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

    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, float("inf"), count)
    error = stdev(values) / count**0.5
    p = 2 * float(t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Interval(mean, float(t.ppf((1 + LEVEL) / 2, count - 1)) * error, count, p)


def by_seed(values: Iterable[tuple[Hashable, float]]) -> list[float]:
    """Return the mean of each seed's values, of pairs (seed, value), in the order in which seeds appear."""
    found: dict[Hashable, list[float]] = {}
    for seed, value in values:
        found.setdefault(seed, []).append(value)
    return [fmean(own) for own in found.values()]


def holm(found: Sequence[Interval]) -> list[bool]:
    """Return for each interval whether its mean differs from zero, in no more than 1 - `LEVEL` of all such families.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    differs = [False] * len(found)
    for rank, i in enumerate(sorted(range(len(found)), key=lambda i: found[i].p)):
        if found[i].p > (1 - LEVEL) / (len(found) - rank):
            break
        differs[i] = True
    return differs


def verdict(gap: Interval, margin: float = MARGIN) -> str:
    """Return what a difference to exact training shows: "above", "below", "equal" or, if neither, "undecided".

    Args:
        gap: of a value less exact training's, by seed.
        margin: most that "equal" may be off, fixed before the run; the interval lies within it.
    """
    if gap.counts and max(abs(gap.low), abs(gap.high)) > margin:
        return "above" if gap.mean > 0 else "below"
    return "equal" if max(abs(gap.low), abs(gap.high)) <= margin else "undecided"


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
