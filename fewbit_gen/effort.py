"""The time limit of a solve, checked by every loop below it.

        with within(10.0):        long loops call `check()`, which raises `OutOfTime` once the limit is reached
            with unhurried():     disables the limit: for work that a correct result requires
            uncharged(kernel)     excludes the time in which a kernel is compiled

Besides, the certificate counts its steps (lower_bound/certificate.py), so that without a time limit the output is
byte-identical on every machine.
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
    """The time limit is reached; caught inside the compiler."""


def check_effort(effort: Any) -> float:
    """Return a number of seconds, infinity for None; raises `FewbitError` unless it is a number above 0."""
    if effort is None:
        return math.inf
    number = isinstance(effort, int | float | np.integer | np.floating) and not isinstance(effort, bool)
    if not number or not effort > 0:
        raise FewbitError(f"effort is a number of seconds above 0, or None for no limit, not {shown(effort)}")
    return float(effort) if effort < 1e9 else math.inf


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let `check` raise after `seconds`, or earlier if an outer limit is earlier."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


@contextmanager
def unhurried() -> Iterator[None]:
    """Disable the limit: `check` raises nothing."""
    token = _end.set(math.inf)
    try:
        yield
    finally:
        _end.reset(token)


def over() -> bool:
    """Return whether the time limit is reached."""
    return time.monotonic() > _end.get()


def check() -> None:
    """Raise `OutOfTime` if the time limit is reached."""
    if over():
        raise OutOfTime


def uncharged(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Return kernel(*arguments); the time of its first call, in which Numba compiles or loads it, is not charged."""
    if getattr(kernel, "signatures", True):
        return kernel(*arguments)
    start = time.monotonic()
    result = kernel(*arguments)
    _end.set(_end.get() + time.monotonic() - start)
    return result
