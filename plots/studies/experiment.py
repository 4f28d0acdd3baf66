"""Experiments: cases that are measured one by one, and a file of rows that grows until none is missing.

    EXPERIMENT = Experiment("curves", cases, measure, seconds, lines, draw)
    run(EXPERIMENT, Path("plots/results"), workers=2)         measures what curves.json lacks; then curves.png

A case tells one row from all others, such as {"bits": 2, "seed": 0}, and is measured in a process of one thread. A file
that is broken off is gone on with; cases that an experiment no longer has stay in it and are left out of its results.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ...tables import FewbitError
from .. import compact_json
from ..figures.save import save_figure

Case = Mapping[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A question to trainings or measurements.

    Attributes:
        name: of its files in the folder of results: data, figure and page.
        cases: all of them, in the order in which they are measured.
        measure: of one case, numbers and texts for JSON. A function of a module, which other processes import.
        seconds: that a case takes, about, beside another on two cores.
        lines: of rows, what came out, as a reader wants to know it.
        draw: the figure of rows.
        workers: most processes at once; 1 where memory or time is measured.
    """

    name: str
    cases: Callable[[], Sequence[Case]]
    measure: Callable[[Case], Mapping[str, Any]]
    seconds: Callable[[Case], float]
    lines: Callable[[Sequence[Row]], Iterator[str]]
    draw: Callable[[Sequence[Row]], Figure]
    workers: int = 2

    def rows(self, folder: Path) -> list[Row]:
        """Return the measured rows of its cases, in their order.

        Raises:
            FewbitError: the file is no file of an experiment.
        """
        found = _read(self.path(folder))
        return [row for case in self.cases() if (row := _row_of(case, found)) is not None]

    def missing(self, folder: Path) -> list[Case]:
        """Return the cases that are not measured yet."""
        found = _read(self.path(folder))
        return [case for case in self.cases() if _row_of(case, found) is None]

    def path(self, folder: Path) -> Path:
        """Return the file of its rows."""
        return folder / f"{self.name}.json"


def run(
    experiment: Experiment, folder: Path, workers: int = 2, after_case: Callable[[], object] = lambda: None
) -> list[Row]:
    """Measure the missing cases, write the file after each and the figure at the end; return all rows.

    Args:
        experiment: what to measure.
        folder: of the results.
        workers: processes at once, as far as the experiment allows.
        after_case: called after each case, for a progress bar.
    """
    path, missing = experiment.path(folder), experiment.missing(folder)
    rows = _read(path)
    for row in _measured(experiment, missing, min(workers, experiment.workers)):
        rows.append(row)
        compact_json.write(path, {"torch": torch.__version__, "rows": rows})
        after_case()
    rows = experiment.rows(folder)
    if rows:
        save_figure(experiment.draw(rows), folder / f"{experiment.name}.png")
    return rows


def _measured(experiment: Experiment, cases: Sequence[Case], workers: int) -> Iterator[Row]:
    """Yield a row for each case, as they are done."""
    if workers < 2:
        for case in cases:
            yield _row(experiment.measure, case)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _prepare_process) as pool:
        left = iter(cases)
        running: set[Future[Row]] = set()
        error: BaseException | None = None  # of the first case that failed: the others are measured all the same
        try:
            while True:
                while len(running) < workers and (case := next(left, None)) is not None:
                    running.add(pool.submit(_row, experiment.measure, case))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    error = error or future.exception()
                    if future.exception() is None:
                        yield future.result()
        finally:
            for future in running:
                future.cancel()
        if error is not None:
            raise error


def _prepare_process() -> None:
    torch.set_num_threads(1)


def _row(measure: Callable[[Case], Mapping[str, Any]], case: Case) -> Row:
    start = time.perf_counter()
    found = measure(case)
    return {**case, **found, "seconds": round(time.perf_counter() - start, 1)}


def _row_of(case: Case, rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if case.items() <= row.items()), None)


def _read(path: str | os.PathLike[str]) -> list[Row]:
    if not Path(path).exists():
        return []
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        if all(isinstance(row, dict) for row in rows):
            return rows
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FewbitError(f"{os.fspath(path)}: no file of an experiment")
