"""Whether L2 costs accuracy on docstrings: the one cell of `finetuning` that counted, on seeds that it has not seen.

In five of five seeds L2 classified docstrings .85 ± .17 points worse than exact training, p = .009 after correction
for 56 single tasks: chosen by its result, and so to be repeated. Registered on 26 November, before the first run: ten
new seeds, 5 to 14, decide alone. Lost if their interval lies below zero; equal if it lies within ± `MARGIN`; else
undecided.

    python -m fewbit.plots.studies.docstrings     writes docstrings.json; eight minutes of a quiet core; resumes
"""

from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure

from ..intervals import Interval, differences, interval
from .__main__ import RESULTS
from .experiment import Case, Experiment, Row, run
from .finetuning import EXACT, Way, measure, plot_finetuning, seconds

SEEDS = range(5, 15)
VARIANTS = (EXACT, "L2")
MARGIN = 0.01  # of accuracy: four of the 400 test texts


def cases() -> list[Case]:
    """Return a case for each seed and variant."""
    return [{"task": "docstring", "variant": v, "seed": s} for s in SEEDS for v in VARIANTS]


def gap(rows: Sequence[Row]) -> Interval | None:
    """Return the accuracy of L2 less exact's of the same seed; None without runs of both."""
    found = [less for _, less in differences(rows, lambda r: r["variant"] == EXACT, ("seed",), "accuracy")]
    return interval(found) if found else None


def outcome(found: Interval) -> str:
    """Return what the rule says."""
    if found.high < 0:
        return "lost"
    return "equal" if max(abs(found.low), abs(found.high)) <= MARGIN else "undecided"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the difference and what the rule says."""
    if (found := gap(rows)) is not None:
        yield f"docstrings at L2: accuracy {found} of {found.count} seeds: {outcome(found)}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: the accuracy of L2 less exact's."""
    found = gap(rows)
    kept = {v: next(r["kept"] for r in rows if r["variant"] == v) for v in VARIANTS}
    ways = [Way("L2", found.mean, found.half, {"docstring": found.mean}, kept["L2"] / kept[EXACT])] if found else []
    return plot_finetuning(ways)


EXPERIMENT = Experiment("docstrings", cases, measure, seconds, lines, draw)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*lines(run(EXPERIMENT, RESULTS, workers=1)), sep="\n")
