"""Proofs of tables: written by the compiler, and replayed by a checker that shares nothing with it."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..tables import FewbitError, Table
from ..tables.files import atomic_write

_MOST_BITS = 4  # 16 levels, the most of a proof


@dataclass(frozen=True)
class Replay:
    """What the checker says of one table.

    Attributes:
        table: the table.
        size: bytes of its proof.
        gap: (error − bound) / error, with the greatest error that the checker finds possible; 0 for an exact table.
        refused: why the proof does not hold; None if it does.
    """

    table: Table
    size: int
    gap: float
    refused: str | None = None


def write_proof(table: Table, path: Path) -> None:
    """Write a proof of `table` to `path`; raises `FewbitError` if there is none, or it cannot be written."""
    from ..fewbit_gen.proof import prove

    content = _text(prove(table)).encode()
    with atomic_write(path) as stream:
        stream.write(content)


def require_checker() -> None:
    """Raise `FewbitError` if the library of the checker is not installed."""
    try:
        import flint  # noqa: F401
    except ModuleNotFoundError:
        raise FewbitError(
            "proofs are checked by python-flint, which is not installed: pip install python-flint"
        ) from None


def provable(tables: Sequence[Table]) -> list[Table]:
    """Return the tables of 1 to 4 bits, those first that take longest."""
    return sorted((table for table in tables if table.bits <= _MOST_BITS), key=lambda table: -table.levels.size)


def replays(tables: Sequence[Table]) -> Iterator[Replay]:
    """Write and check a proof of each table, in as many processes as there are cores; yield each once it is done."""
    workers = min(os.cpu_count() or 1, len(tables))
    if workers < 2:
        yield from map(replay, tables)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        tasks = [pool.submit(replay, table) for table in tables]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)


def replay(table: Table) -> Replay:
    """Write a proof of `table` and check what a reader of the file would have."""
    from ..fewbit_gen.proof import TOLERANCE, prove
    from ..proofs.checker import Refused, check

    try:
        text = _text(prove(table))
    except FewbitError as error:
        return Replay(table, 0, float("inf"), str(error))
    try:
        proven = check(json.loads(text))
    except Refused as refused:
        return Replay(table, len(text), float("inf"), f"the checker refuses its proof: {refused}")
    gap = (proven.error - proven.bound) / proven.error if table.error > 0 else 0.0
    far = None if gap <= TOLERANCE else f"its error is {gap:.2g} above the bound that is proven"
    return Replay(table, len(text), gap, far)


def _text(proof: dict[str, Any]) -> str:
    """Return the JSON text of a proof, one field or layer a line."""
    fields = proof | {"layers": "LAYERS"}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    layers = ",\n".join(json.dumps(layer) for layer in proof["layers"])
    return "{" + lines.replace('"LAYERS"', f"[\n{layers}]") + "}\n"
