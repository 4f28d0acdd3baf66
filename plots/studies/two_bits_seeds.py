"""Two and three bits by sixteen fresh seeds: how far they end above exact training, more sharply than eight can tell.

    python -m fewbit.plots.studies two_bits_seeds --workers 10    `make gpu-6`: a few minutes of a GPU

The models, text, steps and rate of compiled.py, in float32, on a GPU, with seeds that no run had before. The eight
seeds of training-two-bits.json, trained twice, gave a Llama's two bits +.031 ± .036 and +.051 ± .040: too wide to say
on which side of .03 they are. "4 bits, scores 6" is what the default could be, of three quarters of its bytes.

Registered on 27 November 2026, before the first run. Of the validation loss less exact training's of the same seed, by
95 % intervals: two bits are refuted if the mean is above .03 in either model; 3 bits, the default and "4 bits, scores
6" are refuted if the interval lies above zero and reaches beyond `MARGIN`, equal if it lies within ± `MARGIN`, else
undecided. The default becomes "4 bits, scores 6" only where both models' are equal.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from ..figures.gaps import plot_gaps
from ..intervals import interval, verdict
from .compiled import SETTINGS, train_one
from .experiment import Case, Experiment, Row
from .two_bits import gaps

MODELS = ("llama", "gpt2")
BITS = ("exact", "2 bits", "exact, nudged", "3 bits", "4 bits, scores 6", "auto")
SEEDS = range(100, 116)
GREATEST = 0.03  # of two bits' mean gap


def cases() -> list[Case]:
    """Return a case for each seed, model and way to save, by seed."""
    return [{"model": model, "bits": bits, "seed": seed} for seed in SEEDS for model in MODELS for bits in BITS]


def measure(case: Case) -> dict[str, Any]:
    """Train one model; return ten points of its training loss, its validation loss, and what it saves for backward."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = train_one(f"{case['model']}: {case['bits']}", case["seed"], SETTINGS, device=device)
    found = {name: run[name] for name in ("losses", "validation_loss", "saved_bytes")}
    return {**found, "device": torch.cuda.get_device_name() if device == "cuda" else device}


def outcome(bits: str, values: Sequence[float]) -> str:
    """Return what the rule says of the gaps of a way."""
    found = interval(values)
    if bits == "2 bits":
        return "refuted" if found.mean > GREATEST else "not refuted"
    return {"above": "refuted"}.get(said := verdict(found), said)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each model and way: bytes beside exact's, the mean gap, what the rule says, and all gaps."""
    saved = {(row["model"], row["bits"]): row["saved_bytes"] for row in rows}
    for model, ways in gaps(rows, MODELS, BITS).items():
        for bits, values in ways.items():
            part = saved[model, bits] / saved[model, "exact"]
            told = " ".join(f"{gap:+.3f}" for gap in values)
            yield f"{model:6} {bits:17} {part:.3f}  {interval(values)}  {outcome(bits, values)}   {told}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: the gap of each run, and the mean of each way with its interval."""
    return plot_gaps("Validation loss less exact training's, in nats a character", gaps(rows, MODELS, BITS))


EXPERIMENT = Experiment("two_bits_seeds", cases, measure, lambda case: 15.0, lines, draw, workers=16)
