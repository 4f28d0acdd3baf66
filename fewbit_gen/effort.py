"""The seconds that one solve may take, seen by every loop below it.

    with within(10.0):        loops that may run long call `check()`, which raises `OutOfTime` once they are over
        with unhurried():     but not in here: what must be finished for the result to be true
        uncharged(kernel)     the seconds in which a loop is compiled do not count

They are seconds of the processor, not of the clock on the wall: on a machine busy with other work a solve takes longer
and finds the same table.

Beside it the certificate counts its steps (lower_bound/certificate.py), so that without a limit in seconds the same
bytes come out on every machine.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..tables.errors import FewbitError, shown

SECONDS = 10.0  # by default

_end: ContextVar[float] = ContextVar("fewbit_effort_end", default=math.inf)


class OutOfTime(Exception):
    """The seconds are over; never seen outside the compiler."""


def check_effort(effort: Any) -> float:
    """Return a number of seconds, infinity for None; raises `FewbitError` if it is no number above 0."""
    if effort is None:
        return math.inf
    number = isinstance(effort, int | float | np.integer | np.floating) and not isinstance(effort, bool)
    if not number or not effort > 0:
        raise FewbitError(f"effort is a number of seconds above 0, or None for no limit, not {shown(effort)}")
    return float(effort) if effort < 1e9 else math.inf


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let `check` raise once `seconds` are over, or earlier where a limit outside is earlier."""
    token = _end.set(min(_end.get(), time.thread_time() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


@contextmanager
def unhurried() -> Iterator[None]:
    """Let `check` raise nothing."""
    token = _end.set(math.inf)
    try:
        yield
    finally:
        _end.reset(token)


def over() -> bool:
    """Tell whether the seconds are over."""
    return time.thread_time() > _end.get()


def check() -> None:
    """Raise `OutOfTime` if the seconds are over."""
    if over():
        raise OutOfTime


def uncharged(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Return kernel(*arguments), and give back the time that its first call takes: Numba compiles or loads it then."""
    if getattr(kernel, "signatures", True):
        return kernel(*arguments)
    start = time.thread_time()
    result = kernel(*arguments)
    _end.set(_end.get() + time.thread_time() - start)
    return result
