"""Calls in processes of their own, and the peak of a process's resident memory."""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


class ProcessDied(Exception):
    """The process of a call ended without a result: killed, most likely out of memory."""


def call_apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return `function(*arguments)` from a process of its own, which ends with this call even if the call raises.

    Args:
        function: of a module; it and its arguments and result are pickled.
        arguments: of the function.

    Raises:
        ProcessDied: the process ended without a result.
        Exception: any that the function raises.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit this process's memory
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call_and_send, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()  # leaves the child's end as the only one, so that its death closes the pipe
    try:
        result, error = receiver.recv()
    except EOFError:
        raise ProcessDied("its process died") from None
    finally:
        process.terminate()
        process.join()
    if error is not None:
        raise error
    return result


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process so far; None if the system does not report it."""
    try:
        # Since exec. `getrusage` may report the peak of the parent process instead.
        return _status("VmHWM")
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def added_peak_bytes(call: Callable[[], object]) -> int | None:
    """Return how far resident memory rises in a call; None where the system, other than Linux, cannot tell."""
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # else freed memory that malloc keeps would hide what the call takes
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def _call_and_send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    try:
        sender.send((function(*arguments), None))
    except Exception as error:
        sender.send((None, error))
