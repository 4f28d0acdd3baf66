"""Whether a call fits into a limited memory, by trial in a process of its own; and the largest number that fits.

    limited(call, room=2**30, warm_up=call_of_small_size)      what the call returned, or None if it did not fit
    largest_by_trial(fits, guess=100, tolerance=0.02)          the largest n for which fits(n), near 100 or not

The limit is Linux's of a process's private data (RLIMIT_DATA): what the process holds after the warm-up, and `room`.
"""

import gc
import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...tables import FewbitError

_STATUS = Path("/proc/self/status")
# Parts of the messages of torch's and oneDNN's errors when they get no memory.
_OUT_OF_MEMORY = ("memory", "alloc", "could not create", "start new thread")


def limited(call: partial[Any], room: int, warm_up: partial[Any] | None = None) -> Any:
    """Return what `call` returns in a process of its own with `room` bytes, or None if they are too few.

    Args:
        call: of a function that other processes can import; it may return anything but None.
        room: bytes that the process may hold beyond those after `warm_up`.
        warm_up: called before, so that kernels and libraries are loaded.

    Raises:
        FewbitError: this is not Linux, or the call failed for another reason than memory.
    """
    if not _STATUS.exists():
        raise FewbitError("memory is limited by RLIMIT_DATA and /proc, which only Linux has")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([call.func.__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, call, room, warm_up))
    process.start()
    theirs.close()
    try:
        kind, found = ours.recv()
    except EOFError:  # killed, or the end of a C++ library that got no memory
        kind, found = "killed", None
    process.join()
    if kind == "failed":
        raise FewbitError(f"the call failed in its process: {found}")
    return found if kind == "returned" else None


def _run(results: Connection, call: partial[Any], room: int, warm_up: partial[Any] | None) -> None:
    import resource

    try:
        if warm_up:
            warm_up()
        gc.collect()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_held() + room, most))
        results.send(("returned", call()))
    except MemoryError:
        results.send(("full", None))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        full = any(part in str(error) for part in _OUT_OF_MEMORY)
        results.send(("full", None) if full else ("failed", text))


def _held() -> int:
    """Return the bytes of this process's private data."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def largest_by_trial(fits: Callable[[int], bool], guess: int = 1, tolerance: float = 0.0) -> int:
    """Return the largest number for which `fits` is true, or 0; it is true up to some number and false beyond.

    Strides from the guess double until the number is between two trials, which are then bisected.

    Args:
        fits: of a number of 1 or more.
        guess: the first number to try.
        tolerance: share of the number by which the result may be too small; the first stride is twice as long.
    """
    stride = max(1, round(2 * tolerance * guess))
    if fits(guess):
        low, high = guess, guess + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low, high = max(0, guess - stride), guess
        while low and not fits(low):
            stride *= 2
            low, high = max(0, low - stride), low
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
