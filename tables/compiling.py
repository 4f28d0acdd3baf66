"""What Numba compiles: a line that says so, since the first call of a function takes seconds, and a way to refuse it.

Compiled code is kept on disk (see `fewbit doctor --warm`), so that this happens once an install.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

LINE = "fewbit: compiling for the first time, which may take a minute or two; `fewbit doctor --warm` does it ahead"
# Without a configuration of `logging` its lines are written to standard error.
_log = logging.getLogger("fewbit.compiling")


class NotCompiledError(RuntimeError):
    """A function is not in Numba's cache on disk, inside `refused_compilation`."""


@contextmanager
def announced_compilation() -> Iterator[None]:
    """Log `LINE`, once in a process, when Numba compiles a function that is missing from its cache."""
    with _at_compilation(_announce):
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
    """Call `call` when Numba begins to compile: its passes are the one event that functions and C callbacks share."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            call()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:run_pass", Listener()):
        yield
