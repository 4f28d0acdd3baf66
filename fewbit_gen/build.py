"""The shipped tables: solved (`fewbit tables build`) and proven (`fewbit tables verify`).

    build(folder)    solve every table, write one JSON file an activation, yield each table as it is done
    verify(folder)   read the files, integrate every error again, yield each comparison as it is done

Both are generators, so that a caller can show progress, and read and write the files directly, without the cache of
`tables.shipped`.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ..tables import KINDS, Kind, Table
from ..tables.errors import FewbitError
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import read_json
from ..tables.shipped import DATA, WEIGHTS, dump_tables, forget_tables
from ..tables.table import table_from_dict
from .activations import parse_activation
from .activations.registry import FAMILIES
from .certify import table_error
from .lower_bound import TOLERANCE as LARGEST_GAP
from .lower_bound import certificate
from .solver import problem_moments, solve
from .stochastic import is_bounded
from .weights import parse_weight

# All named activations that need no number. (threshold has no defaults; its tables are exact anyway.)
ACTIVATIONS = tuple(sorted(name for name in FAMILIES if name != "threshold"))
BITS = tuple(range(1, 9))
# Of kind stochastic with 5 bits and more the bound is wider where f' is nearly constant over long pieces: the error,
# which is the product of two small distances there, is not what its derivatives by the levels say.
_LARGEST_GAP_AT_RANDOM = 5e-3
# Tolerance for another machine's rounding in exp and in sums; a wrong digit in a file far exceeds it.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Problem:
    """The problem that one shipped table is solved for."""

    activation: str
    weight: str
    kind: Kind
    bits: int


@dataclass(frozen=True)
class Check:
    """The recomputed error of one table.

    Attributes:
        source: the file that holds the table.
        table: the table as stored.
        error: its recomputed error.
        bound: its lower bound, stored or recomputed; None if it has none.
    """

    source: Path
    table: Table
    error: float
    bound: float | None

    @property
    def drift(self) -> float:
        """|error − stored error| / stored error; if the stored error is 0, infinity unless both are 0."""
        difference = abs(self.error - self.table.error)
        if difference == 0:
            return 0.0
        return difference / self.table.error if self.table.error else float("inf")

    @property
    def gap(self) -> float:
        """(error − bound) / error, the possible relative improvement; infinity without a bound."""
        if self.bound is None:
            return float("inf")
        return (self.table.error - self.bound) / self.table.error if self.table.error else 0.0

    @property
    def largest_gap(self) -> float:
        """The gap that a shipped table of this kind and size may have."""
        return _LARGEST_GAP_AT_RANDOM if self.table.kind == "stochastic" and self.table.bits > 4 else LARGEST_GAP

    @property
    def holds(self) -> bool:
        """Whether the stored error is correct to `TOLERANCE`, and the lower bound within `largest_gap` of it."""
        return self.drift <= TOLERANCE and self.gap <= self.largest_gap


def problems(activations: Sequence[str] = ACTIVATIONS, bits: Sequence[int] = BITS) -> tuple[Problem, ...]:
    """Return the problems for `activations`, in the order of the tables in the files.

    A derivative without bounds has no table of kind ``stochastic``.
    """
    return tuple(
        Problem(name, weight, kind, b)
        for name, weight, kind, b in itertools.product(activations, WEIGHTS, KINDS, bits)
        if kind != "stochastic" or is_bounded(parse_activation(name))
    )


def build(folder: Path, todo: Sequence[Problem]) -> Iterator[Table]:
    """Solve `todo`, yield every table once it is solved, and write each activation's file to `folder` when complete.

    Solves as many tables in parallel as there are cores. Output is byte-identical on the same machine and libraries.
    Creates a missing folder. A piecewise-constant derivative (ReLU) has one exact table per kind, for any bits.

    Raises:
        FewbitError: a file cannot be written; this is checked before solving.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FewbitError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    missing = Counter(problem.activation for problem in todo)
    for activation in missing:
        check_writable(folder / f"{activation}.json")
    solved: dict[Problem, Table] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Start with the longest, so that no core is left working alone at the end.
        hardest = sorted(todo, key=lambda problem: -problem.bits)
        # No time limit, so that the result does not depend on the machine's speed.
        tasks = {pool.submit(solve, p.activation, p.bits, p.kind, p.weight, effort=None): p for p in hardest}
        try:
            for task in as_completed(tasks):
                problem = tasks[task]
                solved[problem] = task.result()
                missing[problem.activation] -= 1
                if not missing[problem.activation]:
                    tables = (solved[p] for p in todo if p.activation == problem.activation)
                    with atomic_write(folder / f"{problem.activation}.json") as stream:
                        stream.write(dump_tables(tuple(dict.fromkeys(tables)), _PROVENANCE).encode())
                yield solved[problem]
        finally:
            pool.shutdown(cancel_futures=True)
            forget_tables()


_PROVENANCE = (
    f"made by `fewbit tables build`: exact over a grid, refined to a stationary point, and certified: no table of "
    f"the kind with as many levels has an error below lower_bound, within {LARGEST_GAP:g} of the error; "
    f"of kind stochastic with 5 bits and more, within {_LARGEST_GAP_AT_RANDOM:g}"
)


def table_files(folder: Path = DATA) -> tuple[Path, ...]:
    """Return the table files in `folder`, sorted; raises `FewbitError` if there are none."""
    paths = tuple(sorted(folder.glob("*.json")))
    if not paths:
        raise FewbitError(f"no tables in {folder}: it holds no .json file")
    return paths


def verify(paths: Sequence[Path], bounds: bool = False) -> Iterator[tuple[Path, tuple[Check, ...]]]:
    """Recompute the error of every table in `paths`, and yield every file with its checks.

    Args:
        paths: table files.
        bounds: whether to recompute the lower bounds too, which takes as long as solving.

    Raises:
        FewbitError: a file does not hold tables, or a table's activation or weight is unknown.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path in paths:
            yield path, tuple(pool.map(lambda entry, path=path: _check(path, entry, bounds), _entries(path)))


def _entries(path: Path) -> list[object]:
    content = read_json(path)
    entries = content.get("tables") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise FewbitError(f'{path}: not a file of tables: expected {{"tables": [...]}}')
    return entries


def _check(path: Path, entry: object, bounds: bool) -> Check:
    table = table_from_dict(entry, source=str(path))
    activation, weight = parse_activation(table.activation), parse_weight(table.weight)
    error = table_error(table, activation, weight)
    bound = table.lower_bound
    if bounds and table.error > 0:
        moments = problem_moments(activation, weight, table.kind, table.levels.size)
        bound = certificate(moments, table, table.levels.size).bound
    return Check(path, table, error, bound)
