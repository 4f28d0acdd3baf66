"""What torch's allocator gives and takes back during a call, as its profiler records it: also in compiled code.

    record = allocations(call)      each block: when it is allocated and freed, and its bytes
    with profiled(device) as profiler, numbered(0): y = op(x)
    scratch(profiler, device)       {0: what the operation took beyond its results}

Unlike the operations that peak.py follows, this includes the scratch memory of kernels, and the buffers of compiled
graphs; it needs values, on the CPU or a GPU.

    return_freed_memory()           from now on the C library returns freed blocks to the system at once
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK, _NUMBERED = "fewbit mark", "fewbit operation "
_LOG_LEVEL = "KINETO_LOG_LEVEL"  # of the profiler, which otherwise writes two lines to stderr


@dataclass(frozen=True)
class Block:
    """A block of memory, at an address, from the event that allocates it until before the event that frees it."""

    start: int
    end: int
    nbytes: int
    address: int


@dataclass(frozen=True)
class Allocations:
    """The memory events of a call.

    Attributes:
        blocks: allocated in the call; `end` is the number of events for those that outlive it.
        levels: bytes after each event, of these blocks.
        marks: numbers of the events before which `mark()` was called.
    """

    blocks: tuple[Block, ...]
    levels: NDArray[np.int64]
    marks: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return int(max(0, self.levels.max(initial=0)))


def mark() -> None:
    """Note this moment among the events that `allocations` records."""
    with record_function(_MARK):
        pass


def allocations(call: Callable[[], object], device: torch.device) -> Allocations:
    """Run `call` and return the memory that it takes on `device`; what it returns lives until its end."""
    with profiled(device) as profiler:
        result = call()
    del result
    events = sorted(_walk(_tree_of(profiler)), key=lambda event: event.start_time_ns)
    blocks: list[Block] = []
    living: dict[int, tuple[int, int]] = {}
    levels: list[int] = []
    marks: list[int] = []
    for event in events:
        if event.tag != _EventType.Allocation:
            if event.name == _MARK:
                marks.append(len(levels))
            continue
        fields = event.extra_fields
        if fields.device.type != device.type:
            continue
        before = levels[-1] if levels else 0
        if fields.alloc_size > 0:
            living[fields.ptr] = len(levels), fields.alloc_size
        elif fields.ptr not in living:
            continue  # from before the call
        else:
            start, nbytes = living.pop(fields.ptr)
            blocks.append(Block(start, len(levels), nbytes, fields.ptr))
        levels.append(before + fields.alloc_size)
    blocks += [Block(start, len(levels), nbytes, address) for address, (start, nbytes) in living.items()]
    blocks.sort(key=lambda block: block.start)
    return Allocations(tuple(blocks), np.array(levels, np.int64), tuple(marks))


@contextmanager
def profiled(device: torch.device) -> Iterator[profile]:
    """Record the memory events of this block; what was recorded is there after it."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "6")
    try:
        with profile(activities=activities, profile_memory=True) as profiler:
            yield profiler
    finally:
        if not is_set:
            del os.environ[_LOG_LEVEL]


def numbered(number: int) -> AbstractContextManager[object]:
    """Return a context that is one operation to `scratch`."""
    return record_function(f"{_NUMBERED}{number}")


def scratch(profiler: profile, device: torch.device) -> dict[int, int]:
    """Return the most bytes that each numbered operation took within, beyond what is there at its end."""
    found: dict[int, int] = {}
    for event in _walk(_tree_of(profiler)):
        if event.tag != _EventType.Allocation and event.name.startswith(_NUMBERED):
            inside = [each for each in _walk(event.children) if each.tag == _EventType.Allocation]
            inside.sort(key=lambda each: each.start_time_ns)
            now = most = 0
            for fields in (each.extra_fields for each in inside):
                if fields.device.type == device.type:
                    now += fields.alloc_size
                    most = max(most, now)
            found[int(event.name.removeprefix(_NUMBERED))] = most - max(0, now)
    return found


def _tree_of(profiler: profile) -> Any:
    results: Any = profiler.profiler
    return results.kineto_results.experimental_event_tree()


def _walk(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


# ---- the C library's allocator ---------------------------------------------------------------------------------------


# Of malloc.h in glibc: parameters of `mallopt`, and the size from which a block has memory of its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN_MAPPING = 1 << 16


def return_freed_memory() -> None:
    """Make glibc's malloc return freed blocks to the system at once; elsewhere do nothing.

    Few-bit training frees large tensors and keeps small codes that were made between them. In glibc's heap, which by
    and by serves blocks of up to 32 MiB, each code then holds the gap before it: a process may hold several times what
    torch has. From now on a block of 64 KiB or more has memory of its own, which costs page faults whenever it is used
    anew. Call it before training on a CPU whose memory is scarce. On a GPU it changes nothing: torch's own allocator
    serves it.

    Example:
        fewbit.memory.return_freed_memory()
        model = fewbit.convert(model, level="L2")
    """
    # Only Linux has glibc, and Windows no library of the process itself.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_MAPPING)
        mallopt(_TRIM_THRESHOLD, _OWN_MAPPING)
