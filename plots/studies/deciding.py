"""Tasks on which a baseline can fail: ActNN's ranges, and what V-Quant's annealing owes to the learning rate.

    python -m fewbit.plots.studies deciding

The ResNet-50 of `vquant_rescue`, where bottlenecks of 50 layers add up what rounding does, learns scikit-learn's digits
with the same batches for all runs of a seed.

    ranges       inputs of layers in 2 bits: one range per tensor, one per group (L2), and bits by layer too (L3)
    annealing    RV-Quant with few bits late or early, by thirds; the learning rate falls as in the paper, or stays

The rate that stays is the control that the paper lacks: if few bits are harmless late because steps are small then,
with large steps throughout it matters less when bits are few.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from matplotlib.figure import Figure

from ..demo.data import digits
from ..demo.digits import Schedule, train
from ..figures.gaps import plot_gaps
from ..intervals import Interval, differences, interval
from . import accuracy, vquant_rescue
from .experiment import Case, Experiment, Row
from .vquant import annealer

EXACT = "exact"
# Way → the setting of `accuracy`, in 2 bits with uniform levels and, where gradients are known, moving averages.
RANGES: Mapping[str, Row] = {
    EXACT: accuracy.EXACT,
    "one range per tensor": {"scale": "tensor", "bits": 2, "gradients": "", "levels": "uniform"},
    "L2": {"scale": "group", "bits": 2, "gradients": "", "levels": "uniform"},
    "L3": {"scale": "layer", "bits": 2, "gradients": "average", "levels": "uniform"},
}
LATE, EARLY = vquant_rescue.PAIRS[0]
RATES = ("falls", "stays")
# The seeds of annealing are other ones than those of `vquant_rescue`, whose outcome suggested the statistic.
SEEDS: Mapping[str, range] = {"ranges": range(6), "annealing": range(5, 10)}
TOLERANCE = 0.03  # of accuracy, for "no loss": a tenth of what one range per tensor loses in the pilot

_images = cache(digits)


def cases() -> list[Case]:
    """Return a case for each seed and way of saving, then one for each seed, schedule and learning rate."""
    ranges = [{"claim": "ranges", "way": way, "seed": seed} for seed in SEEDS["ranges"] for way in RANGES]
    annealing = [
        {"claim": "annealing", "way": phases, "rate": rate, "seed": seed}
        for seed in SEEDS["annealing"]
        for rate in RATES
        for phases in (LATE, EARLY)
    ]
    return [*ranges, *annealing]


def measure(case: Case, schedule: Schedule = vquant_rescue.SCHEDULE) -> dict[str, Any]:
    """Train one network; return its accuracy on the test images and the training loss of each epoch."""
    torch.manual_seed(case["seed"])
    model = vquant_rescue.network()
    seeded = Schedule(schedule.epochs, schedule.batch, schedule.learning_rate, case["seed"])
    if case["claim"] == "ranges":
        accuracy.compress(model, RANGES[case["way"]])
        found = train(model, _images(), seeded)
    else:
        annealing = annealer(model, vquant_rescue.phases_of(case["way"]), schedule.epochs, relu_codes=True)
        found = train(model, _images(), seeded, after_epoch=annealing.step, falls=case["rate"] == "falls")
    losses = [round(loss, 5) if math.isfinite(loss) else vquant_rescue.DIVERGED for loss in found.losses]
    return {"accuracy": round(found.accuracy, 6), "loss": losses[-1], "losses": losses}


# ---- what came out ---------------------------------------------------------------------------------------------------


def losses_of_accuracy(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return by way the accuracies less exact's of the same seeds."""
    own = [row for row in rows if row["claim"] == "ranges"]
    found: dict[str, list[float]] = {}
    for row, gap in differences(own, lambda row: row["way"] == EXACT, ("seed",), "accuracy"):
        found.setdefault(row["way"], []).append(gap)
    return found


def lateness(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return by rate the logarithm of errors with few bits late, in parts of those early, of the same seeds.

    Half an error is added to both. Accuracies themselves are far from normal: some seeds fail and others do not.
    """
    images = len(_images().test)
    own = [
        {**row, "log": math.log(images * (1 - row["accuracy"]) + 0.5)} for row in rows if row["claim"] == "annealing"
    ]
    found: dict[str, list[float]] = {}
    for row, gap in differences(own, lambda row: row["way"] == EARLY, ("rate", "seed"), "log"):
        found.setdefault(row["rate"], []).append(gap)
    return found


def outcome(gap: Interval) -> str:
    """Return what a difference of accuracies shows: "fails", "no loss" or "undecided"."""
    if gap.high < 0:
        return "fails"
    return "no loss" if gap.low > -TOLERANCE else "undecided"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each way with what it shows, one for each rate, and what the rate does."""
    for way, values in losses_of_accuracy(rows).items():
        gap = interval(values)
        yield f"{way:20} {gap.count} seeds: accuracy {gap}, {outcome(gap)}"
    found = lateness(rows)
    for rate, values in found.items():
        gap = interval(values)
        yield f"rate {rate}: logarithm of errors late to early {gap}{', counts' if gap.counts else ''}"
    if len({len(values) for values in found.values()}) == 1 and set(found) == {*RATES}:
        gap = interval([falls - stays for falls, stays in zip(found["falls"], found["stays"], strict=True)])
        yield f"what the falling rate adds: {gap}{', counts' if gap.counts else ''}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: the gap of each run, and the mean of each way with its interval."""
    ranges = {f"{way}, 2 bits": [100 * gap for gap in gaps] for way, gaps in losses_of_accuracy(rows).items()}
    annealing = {f"learning rate {rate}": gaps for rate, gaps in lateness(rows).items()}
    panels = {"accuracy less exact's, points": ranges, "log of errors, few bits late to early": annealing}
    means = {way: interval(gaps).mean for way, gaps in ranges.items()}
    message = "; ".join(f"{way}: {mean:+.1f} points" for way, mean in means.items()).replace("-", "−")
    return plot_gaps("", {name: ways for name, ways in panels.items() if ways}, f"50 layers: {message}")


def seconds(case: Case) -> float:
    """Return how long a case takes, about, beside another on two cores."""
    return 25 if case["way"] == EXACT else 60 if case["claim"] == "ranges" else 43


EXPERIMENT = Experiment("deciding", cases, measure, seconds, lines, draw)
