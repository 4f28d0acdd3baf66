"""A task on which naive rounding fails: a hundred classes, 56 layers, 8 and 4 bits (BLPA, Figure 3 and Table 1).

    python -m fewbit.plots.studies naive

A pre-activation ResNet-56, 4 channels wide, learns pairs of digits: exactly, with 8 and 4 bits of each activation saved
(the forward pass is exact), and naively, where the forward pass computes with the rounded activations too. Runs of a
seed begin with the same weights and see the same batches.

The rule, registered before the first counted run, from pilots of other seeds. Gaps are of the training loss (mean of
the last tenth of the steps) and of the test error (computed exactly, as in the paper), less exact training's of the
same seed; intervals are 95 %, and of the eight gaps Holm's correction says which differ from zero.

    the task decides     naive training's four gaps are all above zero; else it shows nothing of the claim
    a gap                "loses" if above zero, shows "no loss" if its interval ends below `MARGINS`, else is undecided
    trains as exact      of 8 and of 4 bits: refuted if one of the two gaps loses, shown if both show no loss
    why                  refuted if naive training is not above few bits of the same number, by the interval
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from ..demo.data import Images, pairs
from ..demo.trainer import Curve
from ..figures.gaps import plot_gaps
from ..intervals import Interval, differences, holm, interval
from . import blpa
from .blpa import VARIANTS, Settings
from .experiment import Case, Experiment, Row

EXACT, *WAYS = (variant.name for variant in VARIANTS[:5])
SEEDS = range(5)  # the pilots had 100 and 101
# At 164 layers exact training of as many seconds ends at 91 % errors, and at 83 layers at 38 %: here at 19 %.
SETTINGS = Settings(depth=56, width=4, batch=32, steps=1200)
# For "no loss": a tenth of what naive training with 8 bits lost in the pilot, 1.02 nats and 65.9 points.
MARGINS: Mapping[str, float] = {"loss": 0.1, "error": 0.066}

_images = cache(pairs)


def cases() -> list[Case]:
    """Return a case for each seed and way to train."""
    return [{"way": way, "seed": seed} for seed in SEEDS for way in (EXACT, *WAYS)]


def measure(case: Case, settings: Settings = SETTINGS) -> dict[str, Any]:
    """Train one network; return its training loss by tenths of the steps, and test losses and errors.

    `own_loss` and `own_error` are of the forward pass of its training, with the statistics of 250 test images: a naive
    network's own rounding. The others are of the exact one with running statistics.
    """
    images, curve = _images(), Curve()
    variant = next(one for one in VARIANTS if one.name == case["way"])
    model = blpa.trained(images, replace(settings, seed=case["seed"]), variant=variant, curve=curve)
    tenth = max(1, settings.steps // 10)
    losses = [round(fmean(curve.losses[i : i + tenth]), 5) for i in range(0, settings.steps, tenth)]
    own_loss, own_error = _tested(copy.deepcopy(model).train(), images)
    test_loss, error = _tested(model.eval(), images)
    found = {"loss": losses[-1], "error": error, "test_loss": test_loss, "own_error": own_error, "own_loss": own_loss}
    return {**found, "losses": losses}


@torch.no_grad()
def _tested(model: nn.Module, images: Images) -> tuple[float, float]:
    scores = torch.cat([model(part) for part in images.test.split(250)])
    error = (scores.argmax(1) != images.test_classes).float().mean()
    return round(float(F.cross_entropy(scores, images.test_classes)), 5), round(float(error), 6)


# ---- what came out ---------------------------------------------------------------------------------------------------


def gaps(rows: Sequence[Row], value: str, exact: str = EXACT) -> dict[str, list[float]]:
    """Return by way the values less those of `exact` of the same seeds."""
    found: dict[str, list[float]] = {}
    for row, gap in differences(rows, lambda row: row["way"] == exact, ("seed",), value):
        found.setdefault(row["way"], []).append(gap)
    return found


def outcome(gap: Interval, differs: bool, margin: float) -> str:
    """Return what a gap to exact training shows: "loses", "no loss" or "undecided"."""
    if differs and gap.mean > 0:
        return "loses"
    return "no loss" if gap.high < margin else "undecided"


def outcomes(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[Interval, str]]:
    """Return by way and value ("loss", "error") the gap to exact training and what it shows."""
    found = {(way, value): interval(own) for value in MARGINS for way, own in gaps(rows, value).items()}
    differs = holm([*found.values()])
    return {key: (gap, outcome(gap, d, MARGINS[key[1]])) for (key, gap), d in zip(found.items(), differs, strict=True)}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each way and value with what it shows, and one for each naive way beside the same bits."""
    for (way, value), (gap, shown) in outcomes(rows).items():
        yield f"{way:14} {value:5} {gap.count} seeds: {gap}, {shown}"
    for bits in ("8 bits", "4 bits"):
        for value in MARGINS:
            less = gaps(rows, value, bits).get(f"naive, {bits}")
            if less:
                gap = interval(less)
                yield f"naive less {bits}: {value} {gap}{', counts' if gap.counts else ''}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: gaps of training loss and of test error, exact and by the training's own forward pass."""
    panels = {
        "training loss less exact's, nats": gaps(rows, "loss"),
        "test error, points": {way: [100 * gap for gap in own] for way, own in gaps(rows, "error").items()},
        "by its own forward pass": {way: [100 * gap for gap in own] for way, own in gaps(rows, "own_error").items()},
    }
    errors = (f"{way} {100 * fmean(own):+.0f}" for way, own in gaps(rows, "error").items())
    message = f"Points of test error above exact's: {'; '.join(errors)}"
    return plot_gaps("", panels, message.replace("-", "−"))


EXPERIMENT = Experiment("naive", cases, measure, lambda case: 65, lines, draw)
