"""Errors of tables that follow a training, beside tables calibrated once, relative to the default's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import BLUE, GREY, INK, VERMILION, style_axes


@dataclass(frozen=True)
class Errors:
    """Errors of one activation's tables under what arrives at a step.

    Attributes:
        step: from 0 on; the table that follows was last exchanged before it.
        module: name.
        default, once, following: of the tables named above.
        best: of the table solved for these inputs themselves.
    """

    step: int
    module: str
    default: float
    once: float
    following: float
    best: float


@dataclass(frozen=True)
class Followed:
    """One training with tables that follow it, beside two others.

    Attributes:
        model: one of `MODELS`.
        bits, adapt, seed, steps: of the training.
        losses: validation loss at the end, by variant.
        errors: every so many steps and after the last, of each activation.
    """

    model: str
    bits: int
    adapt: int
    seed: int
    steps: int
    losses: dict[str, float]
    errors: tuple[Errors, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Followed":
        """Return what `to_dict` made a dict of."""
        return cls(**{**data, "errors": tuple(Errors(**row) for row in data["errors"])})

    def ratio(self, which: str) -> float:
        """Return the mean of ``once``, ``following`` or ``best`` over the default's, after step 0."""
        return fmean(getattr(e, which) / e.default for e in self.errors if e.step > 0)

    @property
    def worst(self) -> float:
        """The largest error of a table that follows, relative to the default's, after step 0."""
        return max(e.following / e.default for e in self.errors if e.step > 0)


def plot_adaptation(runs: Sequence[Followed]) -> Figure:
    """Return a figure with a row for each model and a column for each number of bits, of the runs of the first seed."""
    first = [run for run in runs if run.seed == min(other.seed for other in runs)]
    models, bits = list(dict.fromkeys(run.model for run in first)), sorted({run.bits for run in first})
    figure = Figure(figsize=(3.6 * len(bits), 0.5 + 2.7 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), len(bits), sharex=True, sharey=True, squeeze=False)
    for run in first:
        _draw(panels[models.index(run.model), bits.index(run.bits)], run)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("error of the table ÷ error of the default", fontsize=10)
    figure.suptitle(f"Tables solved anew every {first[0].adapt} steps fit the inputs that training makes", fontsize=11)
    return figure


def _draw(axes: Axes, run: Followed) -> None:
    style_axes(axes)
    axes.set_title(f"{run.model}, {run.bits} bit{'s' if run.bits > 1 else ''}", fontsize=10, color=INK)
    steps = sorted({e.step for e in run.errors})
    axes.axhline(1, color=GREY, linewidth=1)
    lines = ("once", VERMILION, "calibrated once", 5), ("following", BLUE, "following", -13)
    for which, colour, label, above in lines:
        values = {step: [getattr(e, which) / e.default for e in run.errors if e.step == step] for step in steps}
        low, high = ([limit(values[step]) for step in steps] for limit in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        means = [fmean(values[step]) for step in steps]
        axes.plot(steps, means, color=colour, linewidth=1.6)
        axes.annotate(label, (steps[-1], means[-1]), (0, above), textcoords="offset points", ha="right", color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
