"""All rows: `python -m conformance`, or `make conformance`. Exit status 1 if a row breaks a rule without an excuse.

    python -m conformance                                          everything that is not measured yet
    python -m conformance --operators 'cum*' --ways 'hooks*'       some of it
    python -m conformance --operators amax --ways compile --fresh  anew, whatever is on disk

Rows are appended to a file of build/conformance as they are measured, and a run that was broken off goes on where it
stopped. The file's name is a hash of the sources and of torch's version, so that a changed tree starts anew.
"""

import argparse
import fnmatch
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from .operators import operators
from .rows import Row, append, measure_operator, prepare, rows_of
from .rules import EXCUSED, Excused, excuse_of
from .ways import WAYS

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    names, ways = chosen(operators(), options.operators), chosen(WAYS, options.ways)
    fresh = options.fresh or options.samples is not None
    path = ROOT / "build" / "conformance" / f"{f'fresh-{os.getpid()}' if fresh else fingerprint()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    measure_missing(names, ways, path, options.jobs, options.samples)
    wanted = {(name, way) for name in names for way in ways}
    rows = [row for row in rows_of(path) if (row.operator, row.way) in wanted]
    broken = [(row, text) for row in rows for text in row.faults]
    silent = [(row, text) for row, text in broken if not excuse_of(row.operator, row.way, text.partition(":")[0])]
    whole = len(rows) == len(operators()) * len(WAYS)
    idle = unused(broken) if whole else []
    print(summary(rows, ways, broken, silent))
    for excuse in idle:
        print(f"excused, and breaks no rule: {excuse.operator}, {excuse.ways}, {excuse.rule}")
    return 1 if silent or idle or len(rows) < len(wanted) else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conformance", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--operators", default="*", help="names or patterns, with commas between")
    parser.add_argument("--ways", default="*", help="the same")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="measure anew")
    parser.add_argument("--samples", type=int, help="at most so many of each operator, anew")
    return parser.parse_args(arguments)


def chosen(names: Iterable[str], patterns: str) -> list[str]:
    """Return the names that are one of `patterns`, or match one."""
    found = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns.split(","))]
    return found or sys.exit(f"{patterns!r} matches nothing; there are {', '.join(names)}")


def fingerprint() -> str:
    """Return a hash of what rows depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("runtime", "tables", "tests/conformance"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.startswith("test_"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def measure_missing(names: Sequence[str], ways: Sequence[str], path: Path, jobs: int, most: int | None = None) -> None:
    """Append the rows that `path` lacks; a process measures an operator at a time."""
    known = {(row.operator, row.way) for row in rows_of(path)}
    tasks = {name: [way for way in ways if (name, way) not in known] for name in names}
    tasks = {name: missing for name, missing in tasks.items() if missing}
    if len(tasks) <= 2 or jobs == 1:
        prepare()
        for name, missing in tasks.items():
            measure_operator(name, missing, path, most)
        return
    print(f"{len(tasks)} operators to measure, {jobs} at a time, into {path}", flush=True)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare) as pool:
        futures = {pool.submit(measure_operator, name, missing, path, most): name for name, missing in tasks.items()}
        for done, future in enumerate(as_completed(futures), start=1):
            name = futures[future]
            if future.exception() is not None:
                fault = f"exception: the process: {future.exception()}"
                append([Row(name, way, 0, 0, 0.0, (fault,), 0.0) for way in tasks[name]], path)
            if done % 50 == 0 or done == len(tasks):
                print(f"{time.perf_counter() - start:6.0f} s  {done:4} of {len(tasks)}  {name}", flush=True)


def unused(broken: Sequence[tuple[Row, str]]) -> list[Excused]:
    """Return the exceptions that excuse nothing."""
    used = [excuse_of(row.operator, row.way, text.partition(":")[0]) for row, text in broken]
    return [excuse for excuse in EXCUSED if excuse not in used]


def summary(
    rows: Sequence[Row], ways: Sequence[str], broken: Sequence[tuple[Row, str]], silent: Sequence[tuple[Row, str]]
) -> str:
    """Return a line for each way, then the broken rules that nothing excuses."""
    lines = [f"{'way':14} {'operators':>9} {'samples':>8} {'refused':>8} {'excused':>8} {'faults':>7} {'seconds':>8}"]
    for way in ways:
        of = [row for row in rows if row.way == way]
        faults, unexcused = (sum(row.way == way for row, _ in pairs) for pairs in (broken, silent))
        lines.append(
            f"{way:14} {len(of):9} {sum(r.samples for r in of):8} {sum(r.refused for r in of):8} "
            f"{faults - unexcused:8} {unexcused:7} {sum(r.seconds for r in of):8.0f}"
        )
    return "\n".join(lines + [f"  {row.operator:40} {row.way:14} {text}" for row, text in silent])


if __name__ == "__main__":
    sys.exit(main())
