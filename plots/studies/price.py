"""What noise and bias of a gradient cost in a training's loss: the weights by which plans compare errors.

    python -m fewbit.plots.studies.price plots/results/duel.json      of trainings that duel.py has made

Trainings that differ in how derivatives are rounded end above the exact one by about

    gap = a · noise² + b · bias²                                      both relative to the gradient, one step's

The weights are those of least squares, not negative, each case by its standard error; their intervals come of drawing
the seeds anew. Cases at 1 bit are left out: there tables err so much that the gap does not follow the squares. `Price`
in runtime/plan/problem.py has b / a.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

LEAST_BITS, DRAWS = 2, 1000
_NO_LESS = 1e-4  # of a loss: errors of few seeds may come out near zero by chance

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Weights:
    """What a squared relative error adds to the loss.

    Attributes:
        noise, bias: of the part that averages out over steps, and of that which does not.
        ratio: the latter divided by the former, with the ends of its 95 % interval.
    """

    noise: float
    bias: float
    ratio: tuple[float, float, float]


def fit(rows: Sequence[Row], network: str, draws: int = DRAWS) -> Weights:
    """Return the weights for the trainings of a network."""
    cases = [*_cases(rows, network)]
    seeds = len(cases[0])
    draw = np.random.default_rng(0)
    noise, bias = _solved(cases, list(range(seeds)))
    drawn = (_solved(cases, draw.integers(seeds, size=seeds).tolist()) for _ in range(draws))
    ratios = [b / max(a, 1e-9) for a, b in drawn]
    low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
    return Weights(noise, bias, (bias / max(noise, 1e-9), low, high))


def _cases(rows: Sequence[Row], network: str) -> Iterator[np.ndarray]:
    """Yield gap, noise² and bias² of each seed, for each way of rounding; only seeds that all ways have."""
    own = [row for row in rows if row["network"] == network]
    exact = {(row["activation"], row["seed"]): row["loss"] for row in own if row["variant"] == "exact"}
    cases: dict[tuple[Any, ...], dict[int, tuple[float, ...]]] = {}
    for row in own:
        if row["variant"] != "exact" and row["bits"] >= LEAST_BITS:
            gap = row["loss"] - exact[row["activation"], row["seed"]]
            key = row["activation"], row["variant"], row["bits"]
            cases.setdefault(key, {})[row["seed"]] = (gap, row["noise"] ** 2, row["bias"] ** 2)
    common = set.intersection(*(set(case) for case in cases.values()))
    yield from (np.array([case[seed] for seed in sorted(common)]) for case in cases.values())


def _solved(cases: Sequence[np.ndarray], seeds: Sequence[int]) -> tuple[float, float]:
    from scipy.optimize import nnls

    errors = [case[:, 0].std(ddof=1) / len(case) ** 0.5 + _NO_LESS for case in cases]
    means = [case[list(seeds)].mean(0) / error for case, error in zip(cases, errors, strict=True)]
    found, _ = nnls(np.array([mean[1:] for mean in means]), np.array([mean[0] for mean in means]))
    return float(found[0]), float(found[1])


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each network."""
    for network in dict.fromkeys(row["network"] for row in rows):
        found = fit(rows, network)
        ratio, low, high = found.ratio
        loss = fmean(row["loss"] for row in rows if row["network"] == network and row["variant"] == "exact")
        yield (
            f"{network:12} gap = {found.noise:.3f} noise² + {found.bias:.3f} bias² (exact loss {loss:.3f}); "
            f"bias / noise {ratio:.1f}, from {low:.1f} to {high:.1f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the weights for each network of a file of duel.py."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", type=Path, help="what `python -m fewbit.plots.studies.duel` wrote")
    print(*lines(json.loads(parser.parse_args(arguments).rows.read_text())["rows"]), sep="\n")


if __name__ == "__main__":
    main()
