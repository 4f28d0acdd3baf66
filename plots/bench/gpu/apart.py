"""Parts of a call in processes of their own, several at the same time, each within a time.

    for part, row in run_parts([Part("doctor", ("check", "doctor"), 60)], at_once=16, deadline=deadline): ...

A part prints a line of JSON whenever it knows more, and the last one counts: a part that is broken off keeps what it
has said.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE = ("-m", "fewbit.plots.bench.gpu")
_LINES, _WIDTH = 12, 300  # of an error, as many as a record keeps
_LEAST = 2.0  # seconds: with fewer left a part does not begin


@dataclass(frozen=True)
class Part:
    """A part of a call.

    Attributes:
        name: of its row.
        arguments: of Python: ``("-m", "fewbit.plots.bench.gpu", "check", "doctor")``.
        seconds: that it may take.
        environment: variables beside those of this process.
        report: whether it is a bench, which writes its report as it goes to the file that ``-o`` names.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    report: bool = False


def run_parts(parts: Iterable[Part], at_once: int, deadline: float) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yield each part with what came of it, as they end.

    Args:
        parts: to run.
        at_once: how many run at the same time.
        deadline: of `time.monotonic()`, at which all are stopped.

    A row has ``state`` ("ok", "failed", "broken off", "not begun"), ``seconds``, what the part said, and the last
    lines of its errors.
    """
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run_part, part, deadline): part for part in parts}
        for done in as_completed(running):
            yield running[done], done.result()


def run_part(part: Part, deadline: float) -> dict[str, Any]:
    """Return what came of one part, run in a process."""
    begun = time.monotonic()
    left = min(part.seconds, deadline - begun)
    if left < _LEAST:
        return {"state": "not begun"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        status = _status_of(part, folder, left)
        said, errors = _said(folder), (folder / "errors").read_text(errors="replace").splitlines()
        complaint = [line.rstrip()[:_WIDTH] for line in errors if line.strip()][-_LINES:]
    state = "broken off" if status is None else "ok" if status == 0 and said.get("ok", True) else "failed"
    row = {"state": state, "seconds": round(time.monotonic() - begun, 2), **said}
    return row if state == "ok" else {**row, "errors": complaint}


def _status_of(part: Part, folder: Path, seconds: float) -> int | None:
    """Return the exit status of a part's process; None if it was stopped, with all processes that it began."""
    report = ("-o", str(folder / "report.json")) if part.report else ()
    with (folder / "out").open("w") as out, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *part.arguments, *report],
            stdout=out,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _said(folder: Path) -> dict[str, Any]:
    """Return the last line of JSON, or a bench's report."""
    with suppress(OSError, ValueError):
        return {"report": json.loads((folder / "report.json").read_text())}
    for line in reversed((folder / "out").read_text(errors="replace").splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}
