"""Progress bars on standard error, on a terminal only, so that piped or saved output never contains one."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import click

Step = TypeVar("Step")


def with_progress(steps: Iterable[Step], length: int | None, label: str) -> Iterator[Step]:
    """Yield from `steps`, with a progress bar on a terminal; `length` is their number, or None if unknown."""
    if not sys.stderr.isatty():
        yield from steps
        return
    with click.progressbar(steps, length=length, label=label, file=sys.stderr) as bar:
        yield from bar
