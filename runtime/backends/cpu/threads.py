"""Run kernels on torch's own threads.

After an operation torch's OpenMP threads spin for some milliseconds, ready for the next. Separate threads would have to
share the cores with them; so kernels call the OpenMP library that torch has loaded, as compiled code does. If it is not
found under its GNU name (macOS, Windows), or was lost in a fork, a thread pool is used instead.

A kernel takes the address of a `Job` and processes parts of it until none is left: a delayed thread does not keep the
others waiting.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

JOB_WORDS = 20  # three of its own (parts taken, parts, blocks), and 17 arguments: the per-group quantizer's
Job = ctypes.c_int64 * JOB_WORDS

# Below this a second thread costs more than it saves.
BLOCKS_PER_THREAD = 128
_PARTS_PER_THREAD = 8  # others wait for a delayed thread's last part: an eighth of its share
_PROCESS = os.getpid()


@dataclass(frozen=True)
class Kernel:
    """Compiled code: void(int64 *job).

    Attributes:
        address: address of the machine code.
        call: calls it with the address of a job, and releases the GIL meanwhile.
        compiled: reference that keeps the code alive.
    """

    address: int
    call: Any
    compiled: Any


def run(kernel: Kernel, blocks: int, *arguments: int) -> None:
    """Run `kernel` over `blocks` blocks of a job with these arguments, in as many threads as torch uses."""
    run_job(kernel, Job(0, 1, blocks, *arguments))


def run_job(kernel: Kernel, job: Any) -> None:
    """Run `kernel` over the blocks of a `Job`, whose third word is their number, in as many threads as torch uses."""
    threads = _threads(job[2])
    job[1] = threads * _PARTS_PER_THREAD if threads > 1 else 1
    if threads == 1:
        kernel.call(job)
        return
    openmp = _openmp() if os.getpid() == _PROCESS else None
    if openmp is not None:
        openmp.GOMP_parallel(kernel.address, job, threads, 0)
        return
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(kernel.call, job) for _ in range(threads - 1)]
    try:
        kernel.call(job)
    finally:
        _await(others)


def _await(calls: Sequence["Future[None]"]) -> None:
    """Wait for calls that have begun, through an interrupt too: they write into the memory that the caller then frees.

    One that has not begun has nothing left to do.
    """
    try:
        wait([call for call in calls if not call.cancel()])
    except BaseException:
        _await(calls)
        raise


def parts_of(blocks: int) -> int:
    """Return the number of parts into which `run` divides a job of `blocks` blocks."""
    threads = _threads(blocks)
    return threads * _PARTS_PER_THREAD if threads > 1 else 1


def _threads(blocks: int) -> int:
    return 1 if blocks < 2 * BLOCKS_PER_THREAD else min(torch.get_num_threads(), blocks // BLOCKS_PER_THREAD)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations of this thread on this thread alone; other threads are unaffected."""
    openmp = _openmp()
    if openmp is None:
        yield
        return
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library in this process, or None if it does not have GOMP_parallel(body, data, threads, flags).

    LLVM's and Intel's have it too, on Linux. Names are resolved as the loader does for torch.
    """
    try:
        library = ctypes.CDLL(None)
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
    except (OSError, TypeError, AttributeError):  # Windows refuses None
        return None
    return library


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # One for each process: threads do not survive a fork.
    return ThreadPoolExecutor(threads, thread_name_prefix="fewbit")
