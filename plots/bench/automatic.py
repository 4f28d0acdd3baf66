"""What `"auto"` of the compile backend could be with fewer bytes: kept, time and error of candidates, in turn.

    python -m fewbit.plots.bench.automatic -o auto-candidates.json      twenty minutes of a quiet core

The models and steps of `fewbit bench compiled` in float32. A candidate stands for `"auto"` if it keeps at most .11 of
what `torch.compile` keeps in at most 1.05 of its time, and then only after trainings of four seeds and more.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import compact_json
from . import compiled
from .compiled_trainings import COMPILE, MODELS, Case

_FOUR = {"linear": 4, "attention": 4, "nonlinear": 4, "probabilities": 4, "factor": 4}
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "4 bits, scores 6": {"bits": {**_FOUR, "scores": 6}, "recompute_attention": False},
    "4 bits, scores 6, attention again": {"bits": {**_FOUR, "scores": 6}},
    "linear 3 rotated, nonlinear 5": {"bits": {**_FOUR, "linear": 3, "nonlinear": 5, "scores": 8}},
    "linear 3 rotated, probabilities 8": {"bits": {**_FOUR, "linear": 3, "probabilities": 8, "scores": 8}},
}
BESIDE = ("fewbit-auto", "fewbit-4")


def measure(model: str, rounds: int = 11) -> list[dict[str, Any]]:
    """Return a row for each variant: kept and time beside `torch.compile`'s, and the error of the gradients."""
    rows = compiled.measure(Case(model, "float32", options=CANDIDATES), (COMPILE, *BESIDE, *CANDIDATES), rounds)
    return [
        {
            "model": model,
            "variant": row.variant,
            "kept": round(row.kept_ratio or 0.0, 4),
            "time": round(row.ratio or 0.0, 3),
            "ms": round(row.ms, 1),
            "error": round(row.error, 4),
            "same_loss": row.same_loss,
        }
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both models, write the file and print it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for model in MODELS for row in measure(model, chosen.rounds)]
    compact_json.write(chosen.output, {"torch": torch.__version__, "rounds": chosen.rounds, "rows": rows})
    for row in rows:
        print(*row.values(), sep="  ")


if __name__ == "__main__":
    main()
