"""Progress bars on standard error, on a terminal only, so that piped or saved output never contains one."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import click

Step = TypeVar("Step")


def with_progress(steps: Iterable[Step], length: int | None, label: str) -> Iterator[Step]:
    """Yield from `steps`, with a progress bar on a terminal; `length` is their number, or None if unknown."""
    if not sys.stderr.isatty():
        yield from steps
        return
    with click.progressbar(steps, length=length, label=label, file=sys.stderr) as bar:
        yield from bar


def with_clock(work: Callable[..., Step], *arguments: Any, label: str, **keywords: Any) -> Step:
    """Return work(*arguments, **keywords); from its second second on, a terminal shows the label and the seconds."""
    if not sys.stderr.isatty():
        return work(*arguments, **keywords)
    over = threading.Event()

    def tick() -> None:
        start = time.monotonic()
        while not over.wait(1.0):
            print(f"\r{label}: {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        return work(*arguments, **keywords)
    finally:
        over.set()
        clock.join()
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # clears the line
