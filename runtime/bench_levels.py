"""What training a ResNet-50 takes at ActNN's levels, beside the same network as it is: memory, time, largest batch.

    for row in measure(Case(batch=64, size=224, device="cuda"), steps=20): row.level, row.ratio, row.largest_batch

Memory first, with one network at a time on the device, "L5" last: it changes the allocator of the whole process. Then
all networks take turns, a step each, so that a machine whose speed drifts slows all alike: a ratio is the median over
rounds of a step's time divided by the exact network's in the same round. A step is forward, backward and SGD with
momentum, on random images; the networks begin with the same weights.
"""

import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ..plots.studies.blpa_memory import largest_batch_by_trial
from ..plots.studies.networks import NETWORKS
from .convert.actnn import LEVELS
from .convert.api import convert
from .memory.peak import peak_of
from .plan.memory import profile

EXACT = "exact"
CONTESTANTS = (EXACT, "L1", "L2", "L3", "L4", "L5")
# On a GPU, from `LEAST_ON_GPU` elements of images on: a step at L2 by the exact network's, and the best largest batch.
TIME_BAR = 1.15
BATCH_BAR = 6.0
LEAST_ON_GPU = 32 * 3 * 224 * 224
CLASSES = 1000
TOLERANCE = 0.02  # of the largest batch


@dataclass(frozen=True)
class Case:
    """What is measured: `batch` images of size×size, on "cpu" or "cuda"."""

    batch: int = 4
    size: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    """One level.

    Attributes:
        level: its name, or `EXACT`.
        kept: bytes that autograd keeps from forward to backward, where they are swapped those in host memory too.
        peak: most bytes that a step holds at once on the device, beside what is there before it.
        kept_times, peak_times: by how much less that is than the exact network's.
        ms: median time of a step.
        ratio: median over rounds of its time divided by the exact network's.
        largest_batch: by trial, up to `TOLERANCE` too small; None where it was not tried.
        batch_times: by the exact network's.
        stopped_by: what the last batch that failed said.
    """

    level: str
    kept: int
    peak: int
    kept_times: float
    peak_times: float
    ms: float
    ratio: float
    largest_batch: int | None = None
    batch_times: float | None = None
    stopped_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


class Training:
    """A ResNet-50 at a level, and the steps of its training."""

    def __init__(self, level: str, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.model = device, NETWORKS["ResNet-50"]().to(device)
        if level != EXACT:
            convert(self.model, level=level)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def step(self, images: torch.Tensor) -> None:
        """Train on `images`."""
        classes = torch.arange(len(images), device=self.device) % CLASSES
        F.cross_entropy(self.model(images), classes).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def images(self, batch: int, size: int) -> torch.Tensor:
        """Return random images."""
        return torch.randn(batch, 3, size, size, device=self.device)

    def forget(self) -> None:
        """Give back the memory of a step that failed on its way."""
        self.optimizer.zero_grad()
        _free(self.device)


def measure(case: Case, steps: int = 7, *, batches: bool = False, levels: Sequence[str] = CONTESTANTS) -> list[Row]:
    """Return a row for each level, the exact network first.

    Args:
        case: what is measured.
        steps: of each that are timed, after one that is not.
        batches: look for the largest batch too, on a GPU.
        levels: names of `CONTESTANTS`, `EXACT` first.
    """
    rows: list[Row] = []
    for level in levels:
        row = _memory(level, case, batches and case.device == "cuda")
        exact = rows[0] if rows else row
        times = {"kept_times": exact.kept / row.kept, "peak_times": exact.peak / row.peak}
        if row.largest_batch and exact.largest_batch:
            times["batch_times"] = row.largest_batch / exact.largest_batch
        rows.append(replace(row, **times))
    _free(case.device)
    seconds = _times([Training(level, case.device) for level in levels], case, steps)
    return [
        replace(
            row,
            ms=1000 * statistics.median(own),
            ratio=statistics.median(a / b for a, b in zip(own, seconds[0], strict=True)),
        )
        for row, own in zip(rows, seconds, strict=True)
    ]


def met(case: Case, rows: Sequence[Row]) -> dict[str, bool]:
    """Return which bars there are, and whether they are met: on a GPU alone, for images enough to fill it."""
    if case.device != "cuda" or 3 * case.batch * case.size**2 < LEAST_ON_GPU:
        return {}
    bars = {f"{row.level} time": row.ratio <= TIME_BAR for row in rows if row.level == "L2"}
    tried = [row.batch_times for row in rows if row.batch_times is not None]
    return bars | ({"largest batch": max(tried) >= BATCH_BAR} if tried else {})


def _memory(level: str, case: Case, batches: bool) -> Row:
    """Return a row without times; the network that it is of is gone by then."""
    _free(case.device)
    training = Training(level, case.device)
    images = training.images(case.batch, case.size)
    training.step(images)  # momentum is there from now on, kernels are compiled, mixed precision has seen a gradient
    kept = profile(training.model, images).total
    row = Row(level, kept, _peak(training, images), 1.0, 1.0, 0.0, 1.0)
    del images
    return _with_largest_batch(row, training, case) if batches else row


def _peak(training: Training, images: torch.Tensor) -> int:
    if training.device != "cuda":
        return peak_of(lambda: training.step(images))
    _free(training.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.step(images)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _with_largest_batch(row: Row, training: Training, case: Case) -> Row:
    failures: list[str] = []

    def step(batch: int) -> None:
        try:
            if row.level in LEVELS and LEVELS[row.level].swaps:
                _check_host(batch * row.kept // case.batch)
            training.step(training.images(batch, case.size))
            _wait(case.device)
        except RuntimeError as error:  # out of memory is one; others tell of a size that a library does not take
            failures.append(str(error).partition("\n")[0])
            raise

    largest = largest_batch_by_trial(step, RuntimeError, training.forget, TOLERANCE)
    return replace(row, largest_batch=largest, batch_times=1.0, stopped_by=failures[-1])


def _check_host(size: int) -> None:
    """Raise RuntimeError unless half of the host's free memory holds `size` bytes: the system would end the process."""
    if hasattr(os, "sysconf") and size > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        raise RuntimeError(f"no room in host memory for {size / 2**30:.1f} GiB of swapped tensors")


def _times(trainings: Sequence[Training], case: Case, steps: int) -> list[list[float]]:
    """Return the seconds of each step of each training; they take turns, and the first round is not counted."""
    images = trainings[0].images(case.batch, case.size)
    rounds = [[_seconds(training, images) for training in trainings] for _ in range(steps + 1)][1:]
    return [list(own) for own in zip(*rounds, strict=True)]


def _seconds(training: Training, images: torch.Tensor) -> float:
    _wait(training.device)
    start = time.perf_counter()
    training.step(images)
    _wait(training.device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
