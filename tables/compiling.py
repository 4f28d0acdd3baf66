"""What Numba compiles: a line that says so, since the first call of a function takes seconds, and a way to refuse it.

Compiled code is kept on disk (see `fewbit doctor --warm`), so that this happens once an install: of processes that need
a kernel at the same time, one compiles it and the others wait for its file.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .waits import ticking

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Compiled = TypeVar("Compiled")

LINE = "fewbit: compiling for the first time, a minute or two in all; `fewbit doctor --warm` does it ahead"
EVERY = 30.0  # seconds until a line is logged again: one kernel takes minutes where other work fills the machine
SOON = 10.0  # seconds after which torch's compiler, which says nothing, is spoken for
# Without a configuration of `logging` its lines are written to standard error.
_log = logging.getLogger("fewbit.compiling")


class NotCompiledError(RuntimeError):
    """A function is not in Numba's cache on disk, inside `refused_compilation`."""


@contextmanager
def announced_compilation() -> Iterator[None]:
    """Log `LINE`, once in a process, when Numba compiles a function that is missing from its cache."""
    with _at_compilation(_announce):
        yield


def compiled_once(make: Callable[[], Compiled], lock: Path, name: str, place: Callable[[], str]) -> Compiled:
    """Return what `make` compiles or loads from Numba's cache; of the processes that miss it, one compiles at a time.

    What this process compiles, or waits for another to compile, is a line of the log, and again every half minute.

    Args:
        make: compiles one function that Numba keeps on disk. It is called again where the first call finds none.
        lock: the file by which processes wait for one another.
        name: of the function, in these lines.
        place: returns its place among all, in the line of the process that compiles it.
    """
    try:
        with _at_compilation(_miss):
            return make()
    except _MissingError:
        with _repeating() as say:

            @cache
            def tell() -> None:
                say(f"fewbit: compiling {place()}: {name}")

            with (
                _locked(lock, lambda: say(f"fewbit: another process compiles {name}: waiting for it")),
                announced_compilation(),
                _at_compilation(tell),
            ):
                return make()  # the one that held the lock before may have compiled it


@contextmanager
def announced_if_long(line: str | Callable[[], str]) -> Iterator[None]:
    """Log a line, with the seconds, where this block takes longer than `SOON` of them, and again every `EVERY`.

    Args:
        line: or a function that returns what is done at the moment.
    """
    text: Callable[[], str] = (lambda: line) if isinstance(line, str) else line
    with ticking(lambda seconds: _log.warning("%s, %.0f s", text(), seconds), SOON, EVERY):
        yield


@contextmanager
def silent_compilation() -> Iterator[None]:
    """Log nothing about compilation inside."""
    before, _log.disabled = _log.disabled, True
    try:
        yield
    finally:
        _log.disabled = before


@contextmanager
def refused_compilation() -> Iterator[None]:
    """Raise `NotCompiledError` in place of compiling a function that is missing from Numba's cache."""
    with silent_compilation(), _at_compilation(_refuse):
        yield


class _MissingError(Exception):
    """A function is not in Numba's cache on disk, and nothing refuses to compile it."""


def _miss() -> None:
    raise _MissingError


@contextmanager
def _repeating() -> Iterator[Callable[[str], None]]:
    """Yield a function that logs a line; the last one is logged again every `EVERY` seconds, with its own seconds."""
    said: list[tuple[str, float]] = []

    def say(line: str) -> None:
        _log.warning(line)
        said.append((line, time.monotonic()))

    def say_again(_: float) -> None:
        for line, start in said[-1:]:
            _log.warning("%s, %.0f s", line, time.monotonic() - start)

    with ticking(say_again, EVERY, EVERY):
        yield say


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the file `path` inside; where files cannot be written or locked, go on without.

    Args:
        path: of the file.
        waiting: called if the lock is another's.
    """
    handle = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)  # which releases the lock, as the end of a process does


def _announce() -> None:
    if not _log.disabled:
        _announce_once()


@cache
def _announce_once() -> None:
    _log.warning(LINE)


def _refuse() -> None:
    raise NotCompiledError("not in Numba's cache")


@contextmanager
def _at_compilation(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` when this thread has Numba compile: passes are the one event that functions and callbacks share."""
    from numba.core import event

    here = threading.get_ident()  # listeners hear of all threads, whose compilations are no business of this one

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            if threading.get_ident() == here:
                call()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:run_pass", Listener()):
        yield
