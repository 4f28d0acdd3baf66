"""Ten million parameters, 3,000 steps: whether everything in few bits trains as exact training does, as curves.

    python -m fewbit.plots.studies ten_million --workers 12       `make gpu-6`: a few minutes of a GPU

A Llama of six blocks of width 384 learns Python's standard library, all of its modules, character by character: 12
million characters are seen, of a text of some 5 million. Exact training, the same from weights that differ by a
millionth, `torch.compile(backend="fewbit")` at its default, 4, 3 and 2 bits, layers at L2, and `fewbit.fit` by a plan
for the memory that a step takes whose blocks torch computes again. Runs of a seed have the same weights and batches.

Registered on 27 November 2026, before the first run. Of the validation loss in nats a character, less exact training's
of the same seed: a way is refuted if the 95 % interval by seed lies above zero and reaches beyond `MARGIN`, equal if it
lies within ± `MARGIN`, else undecided; and refuted too if its mean is above .03, whatever the interval. Few bits may
end below exact training since their noise keeps a model from learning a text by heart; so the training loss, of the
last tenth of the steps, is judged by the same rule beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.convert.api import convert
from ...runtime.plan.planner import fit, plan
from ..demo.data import Corpus, standard_library
from ..demo.runs import Run
from ..demo.settings import Settings, Size
from ..demo.small_networks import Llama
from ..demo.training import Variant, train
from ..figures.curves_apart import plot_curves_apart
from ..intervals import differences, interval, verdict
from .compiled import OPTIONS, compiled_loss
from .experiment import Case, Experiment, Row

SETTINGS = Settings(
    steps=3000,
    batch=16,
    learning_rate=1e-3,
    size=Size(width=384, depth=6, heads=6, context=256),
    validation_windows=512,
)
WAYS = ("exact", "exact, nudged", "auto", "4 bits", "3 bits", "2 bits", "L2", "plan")
SEEDS = range(3)
POINTS = 60  # of a curve, each the mean of the steps since the one before
GREATEST = 0.03  # of a mean gap, as issues of the project name it
_CHARACTERS = 10_000_000  # more than there are: all of them

corpus = cache(lambda: standard_library(_CHARACTERS))


def cases() -> list[Case]:
    """Return a case for each seed and way, by seed: what is broken off has whole seeds."""
    return [{"way": way, "seed": seed} for seed in SEEDS for way in WAYS]


def measure(case: Case, settings: Settings = SETTINGS, text: Callable[[], Corpus] = corpus) -> dict[str, Any]:
    """Train one model; return the curve of its training loss, its validation loss, bytes saved, and the peak."""
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, in all runs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    settings = replace(settings, seed=case["seed"])
    variant = _variant(case["way"], settings, found)
    (run,) = train([variant], text(), settings, Llama, device=device).runs
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    machine = torch.cuda.get_device_name() if device == "cuda" else device
    return {**_numbers(run), **found, "peak": peak, "device": machine}


def _variant(way: str, settings: Settings, found: dict[str, Any]) -> Variant:
    """Return how a way trains; a plan's numbers go into `found`."""
    if way == "L2":
        return Variant(way, prepare=lambda model: convert(model, level="L2"))
    if way == "plan":
        return Variant(way, prepare=lambda model: found.update(fit_beside_checkpoints(model, settings)))
    return Variant(way, nudge=1e-6 if "nudged" in way else 0.0, loss=compiled_loss(OPTIONS[way]))


def fit_beside_checkpoints(model: nn.Module, settings: Settings) -> dict[str, Any]:
    """Fit a model by the plan for the memory of a step whose blocks are computed again; return what is planned.

    It is made on the meta device, so that the same is planned wherever it runs, and whatever else runs there.
    """
    abstract = deepcopy(model).to("meta")
    windows = torch.zeros(settings.batch, settings.size.context + 1, dtype=torch.int64, device="meta")

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    how: dict[str, Any] = {"loss": loss, "optimizer": "adamw-fused", "gpu": "h100"}
    again = deepcopy(abstract)
    network: Any = again.model
    network.gradient_checkpointing_enable({"use_reentrant": False})
    memory = plan(again.train(), windows[:, :-1], error=10.0, **how).exact_peak
    made = plan(abstract.train(), windows[:, :-1], memory=memory, **how)
    fit(model, plan=made)
    numbers = {"memory": memory, "exact_peak": made.exact_peak, "planned_peak": made.peak.total}
    return {**numbers, "error": made.error, "time": made.time}


def _numbers(run: Run) -> dict[str, Any]:
    each = max(1, len(run.losses) // POINTS)
    means = [fmean(run.losses[at : at + each]) for at in range(0, len(run.losses), each)]
    loss, last = run.validation_loss, run.final_loss
    return {"losses": means, "final_loss": last, "validation_loss": loss, "saved_bytes": run.saved_bytes}


# ---- what came out ---------------------------------------------------------------------------------------------------


def gaps(rows: Sequence[Row], of: str) -> dict[str, list[float]]:
    """Return by way a loss of each seed less exact training's: "validation_loss" or "final_loss"."""
    found: dict[str, list[float]] = {}
    for row, gap in differences(rows, lambda row: row["way"] == "exact", ("seed",), of):
        found.setdefault(row["way"], []).append(gap)
    return {way: found[way] for way in WAYS if way in found}


def outcome(values: Sequence[float]) -> str:
    """Return what the rule says of the gaps of a way."""
    found = interval(values)
    said = "above" if found.mean > GREATEST else verdict(found)
    return {"above": "refuted"}.get(said, said)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each way: bytes beside exact's, both gaps, and what the rule says of them."""
    saved: Mapping[str, int] = {row["way"]: row["saved_bytes"] for row in rows}
    both = [gaps(rows, of) for of in ("validation_loss", "final_loss")]
    for way in both[0]:
        told = [f"{interval(own[way])} {outcome(own[way])}" for own in both]
        each = " ".join(f"{gap:+.4f}" for gap in both[0][way])
        yield f"{way:14} {saved[way] / saved['exact']:.3f}  validation {told[0]}  training {told[1]}   {each}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: each way's training loss less exact's over the steps, and the final gaps."""
    curves: dict[str, list[list[float]]] = {}
    exact = {row["seed"]: row["losses"] for row in rows if row["way"] == "exact"}
    for row in rows:
        if row["way"] != "exact" and row["seed"] in exact:
            less = [a - b for a, b in zip(row["losses"], exact[row["seed"]], strict=True)]
            curves.setdefault(row["way"], []).append(less)
    return plot_curves_apart(
        {way: curves[way] for way in WAYS if way in curves}, SETTINGS.steps, gaps(rows, "validation_loss")
    )


def seconds(case: Case) -> float:
    """Return how long a case takes on a GPU that twelve share."""
    return 150.0


EXPERIMENT = Experiment("ten_million", cases, measure, seconds, lines, draw, workers=16)
