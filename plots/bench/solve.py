"""`fewbit bench solve`: speed of the compiler beside other solvers of the same problems. Needs no torch.

    solve       GELU at 3 bits: moments, exact solver, refinement; no certificate
    interval    the exact solver alone: n cells of GELU's derivative, K levels
    shared      likewise
    build       all shipped tables, certificates included

Each measurement runs in its own process, after a warm-up on a small problem that triggers compilation: so its peak
memory can be measured, and no measurement benefits from another's caches. Times are medians over rounds. One function
computes all errors of a problem, so equal errors mean equally good solutions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from ...cli.progress import with_progress
from ...fewbit_gen.activations import parse_activation
from ...fewbit_gen.build import build, problems
from ...fewbit_gen.interval import solve_interval
from ...fewbit_gen.moments import Moments
from ...fewbit_gen.shared import solve_shared
from ...fewbit_gen.solver import solve
from ...fewbit_gen.stochastic import Segments, range_of, solve_stochastic
from ...fewbit_gen.weights import parse_weight
from ...tables import DEFAULT_WEIGHT, KINDS, Kind
from ...tables.columns import columns
from ...tables.names import counted
from .processes import ProcessDied, call_apart, peak_bytes
from .report import MET, Report, bench_command, rounds_option
from .timing import processor, take_turns

Vector = NDArray[np.float64]

FEWBIT, PLAIN, KMEANS1D, RUPTURES = "fewbit", "plain O(n^2 K)", "kmeans1d", "ruptures"
_ACTIVATION = "gelu"  # its f' has no kinks within the domain: all cells are equal, as kmeans1d and ruptures need them
_BUDGET = 20.0  # seconds after which no further round starts
_GIB = 2**30


@dataclass(frozen=True)
class Task:
    """A measurement to take.

    Attributes:
        what: ``solve``, ``solver`` or ``build``.
        kind: of the tables; None for ``build``, which solves both.
        solver: one of the solvers above.
        n: cells of the grid; None if the compiler chooses.
        K: number of levels.
        bar_ms, bar_bytes: upper limits of time and memory, or None.
    """

    what: str
    kind: Kind | None
    solver: str = FEWBIT
    n: int | None = None
    K: int | None = None
    bar_ms: float | None = None
    bar_bytes: int | None = None


@dataclass(frozen=True)
class Measurement:
    """Result of a task.

    Attributes:
        task: the task.
        ms: median milliseconds over rounds; None if nothing could be measured.
        rounds: number of rounds.
        error: of the solution, as ∫ (f' − q)² w dx; None for ``build``.
        peak_bytes: peak memory of the whole process; None if the system does not report it.
        note: reason for a missing time: ``not installed``, ``out of memory`` or ``its process died``.
    """

    task: Task
    ms: float | None = None
    rounds: int = 0
    error: float | None = None
    peak_bytes: int | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether all bars were met; None if there are none."""
        pairs = ((self.ms, self.task.bar_ms), (self.peak_bytes, self.task.bar_bytes))
        barred = [(value, bar) for value, bar in pairs if bar is not None]
        return all(value is not None and value <= bar for value, bar in barred) if barred else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        fields = asdict(self)
        return {**fields.pop("task"), **fields, "met": self.met}


# The others take part where they need seconds and megabytes only: kmeans1d needs 16 nK bytes.
TASKS = (
    *(Task("solve", kind, K=8, bar_ms=50) for kind in KINDS),
    Task("solver", "interval", FEWBIT, 10_000, 16, bar_ms=500),
    Task("solver", "interval", PLAIN, 10_000, 16),
    Task("solver", "interval", RUPTURES, 10_000, 16),
    Task("solver", "shared", FEWBIT, 10_000, 16),
    Task("solver", "shared", PLAIN, 10_000, 16),
    Task("solver", "shared", KMEANS1D, 10_000, 16),
    Task("solver", "shared", FEWBIT, 100_000, 256),
    Task("solver", "shared", KMEANS1D, 100_000, 256),
    Task("solver", "shared", FEWBIT, 1_000_000, 256, bar_ms=5_000, bar_bytes=4 * _GIB),
    Task("solver", "stochastic", FEWBIT, 1_000_000, 256, bar_ms=1_000, bar_bytes=4 * _GIB),
)
BUILD = Task("build", None, bar_ms=300_000)


@bench_command("solve")
@rounds_option(5)
@click.option("--build", "with_build", is_flag=True, help="Also time the build of all shipped tables; takes minutes.")
def command(rounds: int, with_build: bool) -> Report:
    """Time the compiler beside other solvers of the same problems.

    The others are kmeans1d and ruptures, where they are installed, and the plain dynamic programme. Each row is a
    problem and a solver, with the median time, the error reached, the peak memory of its process, and the bars for time
    and memory. Equal errors are equally good answers. The problems are GELU's under the default weight; `solve` is
    fewbit solve without the certificate, `solver` the exact solver alone on n cells.

    Example: fewbit bench solve --build -o solve.json
    """
    tasks = [*TASKS, *([BUILD] if with_build else [])]
    measurements = list(with_progress(bench_solve(tasks, rounds), len(tasks), "measuring"))
    values = {
        "numpy": version("numpy"),
        "numba": version("numba"),
        "cores": cores(),
        "measurements": [measurement.to_dict() for measurement in measurements],
    }
    heading = f"numpy {values['numpy']}, numba {values['numba']}, {counted(cores(), 'core')}"
    head = ("what", "kind", "by", "n", "K", "ms", "error", "peak MiB", "bar", "met")
    return Report(values, [heading, *columns([head, *map(_row, measurements)], left=3)])


def _row(m: Measurement) -> tuple[str, ...]:
    task = m.task
    bars = [
        *([f"{task.bar_ms:,.0f} ms"] if task.bar_ms else []),
        *([f"{task.bar_bytes / 2**20:,.0f} MiB"] if task.bar_bytes else []),
    ]
    return (
        *(task.what, task.kind or "both", task.solver),
        *(f"{number:,}" if number else "" for number in (task.n, task.K)),
        m.note or f"{m.ms:,.1f}",
        "" if m.error is None else f"{m.error:.9g}",
        "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:,.0f}",
        ", ".join(bars),
        MET[m.met],
    )


def bench_solve(tasks: Sequence[Task] = TASKS, rounds: int = 5) -> Iterator[Measurement]:
    """Yield the measurement of every task in turn.

    Args:
        tasks: the measurements to take.
        rounds: timings of each; fewer where that takes longer than 20 seconds. ``build`` is timed once.
    """
    for task in tasks:
        if task.solver in (KMEANS1D, RUPTURES) and find_spec(task.solver) is None:
            yield Measurement(task, note="not installed")
        else:
            yield _measure_elsewhere(task, rounds)


def measure(task: Task, rounds: int) -> Measurement:
    """Measure `task` in this process."""
    if task.what == "build":
        return _measure_build(task)
    if task.what == "solve":
        run, error = _solve_run(task)
    else:
        run, error = _solver_run(task)
    solutions: list[Any] = []

    def keep() -> None:
        solutions[:] = [run()]

    times = take_turns({task: keep}, rounds, warm_up=0, budget=_BUDGET)
    return Measurement(task, 1e3 * times.median(task), len(times.rounds), error(solutions[0]), peak_bytes())


def cores() -> int:
    """Return the number of processor cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plain_programme(sums: Vector, K: int) -> NDArray[np.int64]:
    """Return the best boundaries, at most K − 1 indices, by the textbook O(n²K) dynamic programme.

    Args:
        sums: (3, n + 1) prefix sums of W, FW and F².
        K: the number of levels.
    """
    w, fw, f2 = sums
    n = w.size - 1
    least = np.zeros((K, n + 1))  # row k: least cost of the first i cells with k + 1 levels
    start = np.zeros((K, n + 1), np.int64)
    for i in range(1, n + 1):
        cost = _costs(w[i] - w[:i], fw[i] - fw[:i], f2[i] - f2[:i])
        least[0, i] = cost[0]
        total = least[:-1, :i] + cost
        start[1:, i] = total.argmin(axis=1)
        least[1:, i] = total.min(axis=1)
    cuts = [n]
    for k in range(K - 1, 0, -1):
        cuts.append(int(start[k, cuts[-1]]) if cuts[-1] else 0)
    return np.unique([cut for cut in cuts if 0 < cut < n]).astype(np.int64)


def interval_error(moments: Moments, boundaries: Vector) -> float:
    """Return the error of the best levels for given increasing `boundaries`, on the grid's edges."""
    low, high = moments.edges[[0, -1]]
    return float(_costs(*moments.between(np.concatenate([[low], boundaries, [high]]))).sum())


def shared_error(moments: Moments, levels: Vector) -> float:
    """Return the error over cell means if every cell takes the nearest of the centred, increasing `levels`."""
    values, mass = cell_means(moments)
    nearest = levels[np.searchsorted(0.5 * (levels[1:] + levels[:-1]), values)]
    return float((mass * (values - nearest) ** 2).sum())


def cell_means(moments: Moments) -> tuple[Vector, Vector]:
    """Return centred mean f' and weight of every cell, sorted by f'."""
    w, fw = moments.cells[0], moments.cells[1]
    order = np.argsort(fw / w, kind="stable")
    return (fw / w)[order], w[order]


def _measure_elsewhere(task: Task, rounds: int) -> Measurement:
    """Measure `task` in a process of its own."""
    try:
        return call_apart(measure, task, rounds)
    except ProcessDied as died:
        return Measurement(task, note=str(died))
    except MemoryError:
        return Measurement(task, note="out of memory")


def _costs(w: Vector, fw: Vector, f2: Vector) -> Vector:
    return np.maximum(f2 - fw * fw / np.where(w > 0, w, 1.0), 0.0)


def _interval_ruptures(moments: Moments, K: int) -> Vector:
    detector = import_module(RUPTURES).KernelCPD(kernel="linear", min_size=1, jump=1)
    ends = detector.fit_predict((moments.cells[1] / moments.cells[0])[:, None], n_bkps=K - 1)
    return moments.edges[np.asarray(ends[:-1])]


def _shared_plain(moments: Moments, K: int) -> Vector:
    values, w = cell_means(moments)
    sums = np.concatenate([np.zeros((3, 1)), np.cumsum([w, w * values, w * values**2], axis=1)], axis=1)
    cuts = np.concatenate([[0], plain_programme(sums, K), [values.size]])
    mass, first, _ = np.diff(sums[:, cuts], axis=1)
    return first / mass


def _shared_kmeans1d(moments: Moments, K: int) -> Vector:
    return np.unique(import_module(KMEANS1D).cluster(moments.cells[1] / moments.cells[0], K).centroids)


_SOLVERS: dict[tuple[str | None, str], Callable[[Moments, int], Vector]] = {
    ("interval", FEWBIT): solve_interval,
    ("interval", PLAIN): lambda moments, K: moments.edges[plain_programme(moments.prefix, K)],
    ("interval", RUPTURES): _interval_ruptures,
    ("shared", FEWBIT): solve_shared,
    ("shared", PLAIN): _shared_plain,
    ("shared", KMEANS1D): _shared_kmeans1d,
    ("stochastic", FEWBIT): lambda moments, K: solve_stochastic(moments, range_of(moments.activation, moments), K),
}
_ERRORS: dict[str | None, Callable[[Moments, Vector], float]] = {
    "interval": interval_error,
    "shared": shared_error,
    "stochastic": lambda moments, levels: Segments.of(moments, levels).error,
}


def _solver_run(task: Task) -> tuple[Callable[[], Vector], Callable[[Vector], float]]:
    assert task.n is not None and task.K is not None
    n, K, solver = task.n, task.K, _SOLVERS[task.kind, task.solver]
    activation, weight = parse_activation(_ACTIVATION), parse_weight(DEFAULT_WEIGHT)
    solver(Moments.of(activation, weight, 64), 4)  # warm-up
    moments = Moments.of(activation, weight, n, order=4)
    return lambda: solver(moments, K), lambda solution: _ERRORS[task.kind](moments, solution)


def _solve_run(task: Task) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    def run() -> Any:
        return solve(_ACTIVATION, levels=task.K, kind=task.kind or "shared", certify=False)

    run()  # warm-up
    return run, lambda table: table.error


def _measure_build(task: Task) -> Measurement:
    for kind in KINDS:
        solve(_ACTIVATION, 1, kind)  # warm-up
    with tempfile.TemporaryDirectory() as folder:
        seconds = processor(lambda: list(build(Path(folder), problems())))
    return Measurement(task, 1e3 * seconds, 1, None, peak_bytes())
