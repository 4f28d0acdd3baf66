"""Two and three bits for everything, on a GPU: a model of ten million parameters, and two small ones.

    python -m fewbit.plots.studies two_bits --workers 14

The trainings of compiled.py on a GPU, many at the same time: Python's standard library, character by character, through
`torch.compile(backend="fewbit")`. All runs of a model and seed have the same weights and batches, and differ in what is
handed from the forward to the backward pass; "exact, nudged" starts from weights that differ by a millionth. Widths are
multiples of 64, so that the GPU's kernels turn all rows.

Refuted by: at 3 bits a gap of the model of ten million parameters above twice that of its nudged run; at 2 bits one
above .03. Before the first twenty runs eight seeds of the small models were registered too, with a mean gap of .03 at 2
bits; the GPU's time sufficed for two, which show how far training wanders by itself at this width and rate. Before any
run of the large model in few bits its seeds became two in place of one: the rule is of their means, and at 3 bits of
twice the mean distance of the nudged runs from the exact ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from ..demo.settings import Settings, Size
from ..figures.gaps import plot_gaps
from ..intervals import differences, interval
from .compiled import SETTINGS, train_one
from .experiment import Case, Experiment, Row

BITS = ("exact", "exact, nudged", "2 bits", "3 bits", "2 bits, groups", "auto")
SMALL = replace(SETTINGS, size=Size(width=192, depth=4, heads=4, context=128))
LARGE = Settings(
    steps=2000,
    batch=32,
    learning_rate=1e-3,
    size=Size(width=384, depth=6, heads=6, context=256),
    validation_windows=512,
)
MODELS: Mapping[str, tuple[str, Settings, range]] = {
    "ten million": ("llama", LARGE, range(2)),
    "llama": ("llama", SMALL, range(2)),
    "gpt2": ("gpt2", SMALL, range(2)),
}


def cases() -> list[Case]:
    """Return a case for each seed, model and way to save, by seed."""
    every = [{"model": m, "bits": b, "seed": s} for m, (_, _, seeds) in MODELS.items() for s in seeds for b in BITS]
    return sorted(every, key=lambda case: case["seed"])


def measure(case: Case) -> dict[str, Any]:
    """Train one model; return ten points of its training loss, its validation loss, and what it saves for backward."""
    model, settings, _ = MODELS[case["model"]]
    torch.set_float32_matmul_precision("high")  # TF32, in all runs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = train_one(f"{model}: {case['bits']}", case["seed"], settings, device=device)
    found = {name: run[name] for name in ("losses", "validation_loss", "saved_bytes")}
    return {**found, "device": torch.cuda.get_device_name() if device == "cuda" else device}


def gaps(
    rows: Sequence[Row], models: Iterable[str] = tuple(MODELS), ways: Iterable[str] = BITS
) -> dict[str, dict[str, list[float]]]:
    """Return by model and way the validation losses less exact's of the same seeds, in the order of the seeds."""
    trained = [row for row in rows if row["validation_loss"] is not None]
    found: dict[str, dict[str, list[float]]] = {model: {} for model in models}
    for row, gap in differences(trained, lambda row: row["bits"] == "exact", ("model", "seed"), "validation_loss"):
        found[row["model"]].setdefault(row["bits"], []).append(gap)
    return {model: {bits: own[bits] for bits in ways if bits in own} for model, own in found.items() if own}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each model and way: the gaps of all seeds, their mean, and the bytes beside exact's."""
    saved = {(row["model"], row["bits"]): row["saved_bytes"] for row in rows}
    for model, ways in gaps(rows).items():
        for bits, values in ways.items():
            part = saved[model, bits] / saved[model, "exact"]
            yield f"{model:12} {bits:15} {part:.3f}  {interval(values)}   {' '.join(f'{gap:+.3f}' for gap in values)}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: the gap of each run, and the mean of each way with its interval."""
    return plot_gaps("Validation loss less exact training's, in nats a character", gaps(rows))


def seconds(case: Case) -> float:
    """Return how long a case takes on a GPU that fourteen share."""
    return 150.0 if case["model"] == "ten million" else 25.0


EXPERIMENT = Experiment("two_bits", cases, measure, seconds, lines, draw, workers=14)
