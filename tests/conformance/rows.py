"""One row: an operator by a way, over its samples."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .operators import operators, samples_of, spread
from .rules import error_of, faults
from .step import Step
from .ways import WAYS, Way


@dataclass(frozen=True)
class Row:
    """What an operator does by a way.

    Attributes:
        operator, way: their names.
        samples: that were held beside the exact step.
        refused: samples that the exact step refuses, or that have no gradient.
        error: the largest of the gradients'.
        faults: of each rule that is broken, the first: "rule: what was found (samples)".
        seconds: taken.
    """

    operator: str
    way: str
    samples: int
    refused: int
    error: float
    faults: tuple[str, ...]
    seconds: float


def measure(operator: str, ways: Sequence[str], most: int | None = None) -> list[Row]:
    """Return the rows of an operator by each of `ways`, of at most `most` samples."""
    samples = samples_of(operator)  # once for all ways: torch seeds every kind of device anew for each of them
    chosen = {way: spread(samples, most or WAYS[way].most) for way in ways}
    tallies = {way: _Tally() for way in ways}
    for number, sample in samples:
        exact: dict[type, Step | None] = {}  # the same for all ways of a kind
        for way in (way for way in ways if number in chosen[way]):
            kind, start = type(WAYS[way]), time.perf_counter()
            if kind not in exact:
                exact[kind] = _exact(WAYS[way], operator, sample)
            tallies[way].add(way, operator, number, sample, exact[kind])
            tallies[way].seconds += time.perf_counter() - start
    return [tally.row(operator, way) for way, tally in tallies.items()]


@dataclass
class _Tally:
    """What the samples of a row have shown so far."""

    samples: int = 0
    refused: int = 0
    error: float = 0.0
    seconds: float = 0.0
    faults: dict[str, tuple[str, list[int]]] = field(default_factory=dict)

    def add(self, way: str, operator: str, number: int, sample: Any, exact: Step | None) -> None:
        """Hold a sample's step beside the exact one."""
        if exact is None:
            self.refused += 1
            return
        self.samples += 1
        try:
            step = WAYS[way].step(operators()[operator], sample)
        except Exception as fault:
            texts = [f"exception: {type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:160]}"]
        else:
            texts = [*faults(exact, step, WAYS[way].most_error(operators()[operator], sample, exact))]
            if any(text.startswith("forward:") for text in texts) and _varies(way, operator, sample, exact, step):
                texts = [text for text in texts if not text.startswith("forward:")]
            self.error = max(self.error, error_of(exact, step))
        for text in texts:
            self.faults.setdefault(text.partition(":")[0], (text, []))[1].append(number)

    def row(self, operator: str, way: str) -> Row:
        """Return the row."""
        texts = (f"{text} (samples {', '.join(map(str, numbers[:8]))})" for text, numbers in self.faults.values())
        return Row(operator, way, self.samples, self.refused, self.error, tuple(texts), round(self.seconds, 2))


def _exact(way: Way, operator: str, sample: Any) -> Step | None:
    """Return the exact step; None where torch itself refuses it or gives no gradient."""
    try:
        exact = way.exact(operators()[operator], sample)
    except Exception:
        return None
    return exact if any(g is not None for g in exact.gradients) else None


def _varies(way: str, operator: str, sample: Any, exact: Step, step: Step) -> bool:
    """Return whether torch itself gives these outputs in one of a few calls, or others than it gave before.

    LAPACK's least squares differ in their last bits from call to call, by where their memory begins, and one place in
    memory may serve all of these calls: theirs have to be close.
    """
    if operator.startswith("linalg.lstsq"):
        return all(map(torch.allclose, step.outputs, exact.outputs))
    repeated = (_exact(WAYS[way], operator, sample) for _ in range(8))

    def forward_is(a: Step, b: Step) -> bool:
        return not any(text.startswith("forward:") for text in faults(a, b, math.inf))

    return any(forward_is(again, step) or not forward_is(again, exact) for again in repeated if again is not None)


def append(rows: Sequence[Row], path: Path) -> None:
    """Add rows to a file; a line that a broken run left unfinished ends before them."""
    with path.open("a") as file:
        file.write("".join("\n" + json.dumps(asdict(row)) for row in rows))


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file; a line that a broken run left unfinished is left out."""
    rows = []
    for line in filter(None, path.read_text().splitlines() if path.exists() else ()):
        try:
            row = json.loads(line)
            rows.append(Row(**{**row, "faults": tuple(row["faults"])}))
        except (ValueError, TypeError):
            print(f"{path}: a line that is no row is left out")
    return rows


def prepare() -> None:
    """Set up a process that measures."""
    torch.set_num_threads(1)


def measure_operator(operator: str, ways: Sequence[str], path: Path, most: int | None = None) -> list[Row]:
    """Measure an operator by several ways, and append the rows to a file."""
    rows = measure(operator, ways, most)
    append(rows, path)
    return rows
