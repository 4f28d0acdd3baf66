"""Training of GPT-2 by plans for three memories, beside exact training: is the plans' order that of their losses?

    python -m fewbit.plots.studies.planner_training -o plots/results/training-planner.json

Paired seeds on the standard library's source: the same weights and batches, all forward passes exact. Each plan is made
for the first batch, for a share of the memory between the least and that of exact training. Blocks are not recomputed:
all that a plan changes is the bits. At this learning rate a run with nudged weights ends as the exact one, so that what
moves a loss is the rounding; how far it moves is what a plan's error predicts, not whether up or down.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.plan.document import Plan
from ...runtime.plan.planner import fit, plan
from .. import compact_json
from ..demo.data import Corpus, standard_library
from ..demo.runs import summary
from ..demo.settings import Settings, Size
from ..demo.small_networks import GPT2
from ..demo.training import EXACT, NUDGED, Variant, train
from ..intervals import interval

SETTINGS = Settings(
    steps=300, batch=8, learning_rate=1e-3, size=Size(width=96, depth=4, heads=4, context=128), validation_windows=256
)
SHARES = (0.0, 0.2, 0.6)  # of the memory between the least and exact training's


def planned(model: nn.Module, windows: Tensor, share: float) -> Plan:
    """Return the plan for a share of the memory between the least and that of exact training."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def of(**limits: Any) -> Plan:
        return plan(model, windows[:, :-1], loss=loss, recompute=False, **limits)

    least = of(error=10.0)
    return of(memory=int(least.peak.total + share * (least.exact_peak - least.peak.total)) + 1)


def runs_of(seed: int, corpus: Corpus, settings: Settings) -> list[dict[str, Any]]:
    """Train exactly, nudged, and by each plan; return the results for JSON."""
    plans: dict[str, Plan] = {}
    windows = torch.stack([corpus.training[i * 129 : (i + 1) * 129] for i in range(settings.batch)]).long()

    def prepare(name: str, share: float) -> Callable[[nn.Module], None]:
        def prepared(model: nn.Module) -> None:
            plans[name] = planned(model, windows, share)
            fit(model, plan=plans[name])

        return prepared

    variants = [Variant(f"plan, {share:.0%}", prepare=prepare(f"plan, {share:.0%}", share)) for share in SHARES]
    found = train([EXACT, NUDGED, *variants], corpus, replace(settings, seed=seed), GPT2)
    rows = []
    for run in found.runs:
        row = summary(run, seed)
        name = row["variant"]
        if name in plans:
            made = plans[name]
            row |= {"error": made.error, "peak": made.peak.total, "exact_peak": made.exact_peak}
        rows.append(row)
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each variant: its predicted error, its validation loss less exact's, and how far that is off."""
    exact = {row["seed"]: row["validation_loss"] for row in rows if row["variant"] == "exact"}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        gaps = [row["validation_loss"] - exact[row["seed"]] for row in own]
        error = fmean(row.get("error", 0.0) for row in own)
        peak = fmean(row.get("peak", 0.0) / row.get("exact_peak", 1.0) for row in own)
        away, found = fmean(map(abs, gaps)), interval(gaps)
        yield (
            f"{name:14} error {error:.4f}, peak ×{peak:.3f}, "
            f"loss {found.mean:+.5f} ± {found.half:.5f} of {found.count}, "
            f"away from exact's by {away:.5f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the seeds that the file does not have yet, write it after each, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; seeds that it has are not run again")
    parser.add_argument("--seeds", type=int, default=8)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = json.loads(chosen.output.read_text())["runs"] if chosen.output.exists() else []
    corpus = standard_library()
    for seed in range(chosen.seeds):
        if any(row["seed"] == seed for row in rows):
            continue
        rows += runs_of(seed, corpus, SETTINGS)
        compact_json.write(chosen.output, {"steps": SETTINGS.steps, "runs": rows})
        print(*lines(rows), sep="\n", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
