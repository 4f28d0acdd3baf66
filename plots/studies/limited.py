"""Whether a call fits into a limited memory, by trial in a process of its own.

    limited(call, room=2**30, warm_up=call_of_small_size)      what the call returned, or None if it did not fit

The limit is Linux's of a process's private data (RLIMIT_DATA): what the process holds after the warm-up, and `room`.
"""

import gc
import multiprocessing
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
