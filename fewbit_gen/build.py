"""The shipped tables: solved (`fewbit tables build`) and proven (`fewbit tables verify`).

    build(folder)    solve every table, write one JSON file an activation, yield each file as it is done
    verify(folder)   read the files, integrate every error again, yield each comparison as it is done

Both work step by step, so that a caller can show progress, and read and write the files themselves: what
`tables.shipped` has cached in this process plays no part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..tables import DEFAULT_WEIGHT, KINDS, Table
from ..tables.errors import FewbitError
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps, read_json, table_from_dict, table_to_dict
from ..tables.shipped import DATA, shipped_activations, shipped_tables
from .activations import parse_activation
from .certify import table_error
from .solver import solve
from .weights import parse_weight

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "selu", "sigmoid", "silu", "softplus", "tanh")
BITS = (1, 2, 3, 4)
# Room for another machine's rounding in exp and in sums; a wrong digit in a file is far above it.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Check:
    """One table whose error was integrated again.

    Attributes:
        source: the file that holds the table.
        table: the table as stored.
        error: its error as it comes out now.
    """

    source: Path
    table: Table
    error: float

    @property
    def drift(self) -> float:
        """|error − stored error| / stored error; where the stored error is 0, infinity unless both are."""
        difference = abs(self.error - self.table.error)
        if difference == 0:
            return 0.0
        return difference / self.table.error if self.table.error else float("inf")

    @property
    def holds(self) -> bool:
        """Whether the stored error is right to `TOLERANCE`."""
        return self.drift <= TOLERANCE


def tables_for(activation: str, bits: Sequence[int] = BITS, weight: str = DEFAULT_WEIGHT) -> tuple[Table, ...]:
    """Return the tables of `activation` of every kind at `bits`, each once.

    An activation whose derivative takes few values (ReLU) has one exact table a kind, whatever the bits.
    """
    solved = (solve(activation, bits=b, kind=kind, weight=weight) for kind in KINDS for b in bits)
    return tuple(dict.fromkeys(solved))


def build(folder: Path = DATA, activations: Sequence[str] = ACTIVATIONS) -> Iterator[Path]:
    """Solve the shipped tables, write them to `folder` and yield every file once it is there.

    The same machine and libraries write the same bytes again. A missing folder is made.

    Raises:
        FewbitError: a file cannot be written; nothing has been solved then.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FewbitError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    paths = {activation: folder / f"{activation}.json" for activation in activations}
    for path in paths.values():
        check_writable(path)
    for activation, path in paths.items():
        tables = tables_for(activation)
        with atomic_write(path) as stream:
            stream.write(dumps({"tables": [table_to_dict(table) for table in tables]}).encode())
        shipped_activations.cache_clear()
        shipped_tables.cache_clear()
        yield path


def table_files(folder: Path = DATA) -> tuple[Path, ...]:
    """Return the table files in `folder`, sorted; raises `FewbitError` if there are none."""
    paths = tuple(sorted(folder.glob("*.json")))
    if not paths:
        raise FewbitError(f"no tables in {folder}: it holds no .json file")
    return paths


def verify(paths: Sequence[Path]) -> Iterator[tuple[Path, tuple[Check, ...]]]:
    """Integrate the error of every table in `paths` again, and yield every file with its checks.

    Raises:
        FewbitError: a file does not hold tables, or a table's activation or weight is unknown.
    """
    for path in paths:
        yield path, tuple(_check(path, entry) for entry in _entries(path))


def _entries(path: Path) -> list[object]:
    content = read_json(path)
    entries = content.get("tables") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise FewbitError(f'{path}: not a file of tables: expected {{"tables": [...]}}')
    return entries


def _check(path: Path, entry: object) -> Check:
    table = table_from_dict(entry, source=str(path))
    error = table_error(table, parse_activation(table.activation), parse_weight(table.weight))
    return Check(path, table, error)
