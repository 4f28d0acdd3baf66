"""Progress bars: on a terminal, on standard error, so that what is piped or saved never holds one."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import click

Step = TypeVar("Step")


def with_progress(steps: Iterable[Step], length: int | None, label: str) -> Iterator[Step]:
    """Yield from `steps`, of which there are `length` (None: nobody knows), with a bar where a person is watching."""
    if not sys.stderr.isatty():
        yield from steps
        return
    with click.progressbar(steps, length=length, label=label, file=sys.stderr) as bar:
        yield from bar
