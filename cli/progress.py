"""Progress on standard error: bars on a terminal, and elsewhere, so that a log shows life, a line every half minute."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import click

from ..tables.waits import ticking

Step = TypeVar("Step")

# Seconds between two lines where standard error is no terminal. What takes less prints none, so that the output of
# short commands stays what scripts compare it with.
EVERY = 30.0


class Lines:
    """Lines that say how many steps are done, where standard error is no terminal.

    Args:
        label: what the steps do.
        length: number of steps; None if unknown.
    """

    def __init__(self, label: str, length: int | None) -> None:
        self.label, self.length, self.done = label, length, 0
        self.start = self.said = time.monotonic()

    def advance(self) -> None:
        """Count a step; print a line if the last one is `EVERY` seconds ago."""
        self.done += 1
        now = time.monotonic()
        if now - self.said >= EVERY and not sys.stderr.isatty():
            self.said = now
            of = "" if self.length is None else f" of {self.length}"
            print(f"{self.label}: {self.done}{of}, {now - self.start:.0f} s", file=sys.stderr, flush=True)


def with_progress(steps: Iterable[Step], length: int | None, label: str) -> Iterator[Step]:
    """Yield from `steps`, with a progress bar on a terminal, else with `Lines`; `length` is None if unknown."""
    if not sys.stderr.isatty():
        lines = Lines(label, length)
        for step in steps:
            yield step
            lines.advance()
        return
    with _lines_apart(), click.progressbar(steps, length=length, label=label, file=sys.stderr) as bar:
        yield from bar


@contextmanager
def counted_steps(length: int, label: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `length` steps: a progress bar on a terminal, else `Lines`."""
    if not sys.stderr.isatty():
        yield Lines(label, length).advance
        return
    with _lines_apart(), click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def with_clock(work: Callable[..., Step], *arguments: Any, label: str | Callable[[], str], **keywords: Any) -> Step:
    """Return work(*arguments, **keywords), with a `clock` meanwhile."""
    with clock(label):
        return work(*arguments, **keywords)


@contextmanager
def clock(label: str | Callable[[], str], soon: float | None = None) -> Iterator[None]:
    """Show the label and the seconds that this block has taken.

    A terminal shows them from the second second on, in one line that is cleared at the end; elsewhere they are printed
    every `EVERY` seconds, and first after `soon` of them, if that is given. A `label` that is a function returns what
    is done at the moment.
    """
    text: Callable[[], str] = (lambda: label) if isinstance(label, str) else label
    is_terminal = sys.stderr.isatty()
    before, after = ("\r", "\033[K") if is_terminal else ("", "\n")  # the code clears the rest of the line
    first, every = (1.0, 1.0) if is_terminal else (EVERY if soon is None else soon, EVERY)

    def tell(seconds: float) -> None:
        print(f"{before}{text()}: {seconds:.0f} s", end=after, file=sys.stderr, flush=True)

    try:
        with _lines_apart() if is_terminal else nullcontext(), ticking(tell, first, every):
            yield
    finally:
        print("\r\033[K" if is_terminal else "", end="", file=sys.stderr, flush=True)


@contextmanager
def _lines_apart() -> Iterator[None]:
    """Have what is said of compilations begin on a line of its own: a bar or a clock stands on the terminal's last."""
    log, handler = logging.getLogger("fewbit.compiling"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("\r\033[K%(message)s"))
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
