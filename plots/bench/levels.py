"""`fewbit bench levels`: time and memory of training a ResNet-50 at ActNN's levels, beside exact training.

    for row in measure(Case(batch=64, size=224, device="cuda"), steps=20): row.level, row.ratio, row.largest_batch

Memory is measured first, with one network at a time on the device and "L5" last, since it changes the allocator of the
whole process. Then the networks take turns step by step: a ratio is the median over rounds of a step's time divided by
the exact network's in the same round. A step is forward, backward and SGD with momentum on random images; all networks
start from the same weights.
"""

import gc
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import click
import torch
from torch.nn import functional as F

from ...runtime.convert.actnn import LEVELS
from ...runtime.convert.api import convert
from ...runtime.memory.peak import peak_of
from ...runtime.plan.memory import profile
from ...tables.columns import columns
from ..studies.blpa_memory import largest_batch_by_trial
from ..studies.networks import NETWORKS
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import clock_of, take_turns

EXACT = "exact"
CONTESTANTS = (EXACT, "L1", "L2", "L3", "L4", "L5")
# GPU targets, from `LEAST_ON_GPU` elements of images on: time of an L2 step relative to exact, and batch increase.
TIME_BAR = 1.15
BATCH_BAR = 6.0
LEAST_ON_GPU = 32 * 3 * 224 * 224
CLASSES = 1000
TOLERANCE = 0.02  # of the largest batch


@dataclass(frozen=True)
class Case:
    """A problem: `batch` images of size×size, on "cpu" or "cuda"."""

    batch: int = 4
    size: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    """Result for one level.

    Attributes:
        level: its name, or `EXACT`.
        kept: bytes that autograd saves, including those swapped to host memory.
        peak: peak memory of a step on the device, beyond what is allocated before it.
        kept_times, peak_times: the exact network's bytes divided by these.
        ms: median time of a step.
        ratio: median over rounds of its time divided by the exact network's.
        largest_batch: found by trial, up to `TOLERANCE` too small; None if not tried.
        batch_times: relative to the exact network's.
        stopped_by: error message of the last batch that failed.
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
    """A ResNet-50 at one level, with its optimizer."""

    def __init__(self, level: str, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.model = device, NETWORKS["ResNet-50"]().to(device)
        if level != EXACT:
            convert(self.model, level=level)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def step(self, images: torch.Tensor) -> None:
        """Run one training step on `images`."""
        classes = torch.arange(len(images), device=self.device) % CLASSES
        F.cross_entropy(self.model(images), classes).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def images(self, batch: int, size: int) -> torch.Tensor:
        """Return random images."""
        return torch.randn(batch, 3, size, size, device=self.device)

    def forget(self) -> None:
        """Free the memory of a step that failed midway."""
        self.optimizer.zero_grad()
        _free(self.device)


_SIZE = click.IntRange(1, 2**16)
_DEFAULTS = {"cpu": (4, 64), "cuda": (64, 224)}  # batch size, pixels per side


@bench_command("levels", threads=True, device=True)
@click.option("--batch", type=_SIZE, metavar="N", help="Images in a batch.  [default: 4, on a GPU 64]")
@click.option(
    "--image-size",
    type=click.IntRange(33, 4096),
    metavar="N",
    help="Height and width of an image.  [default: 64, on a GPU 224]",
)
@rounds_option(9, "Timed steps.", "--steps")
@click.option("--batches/--no-batches", default=True, help="On a GPU, also find the largest batch.")
def command(device: str, batch: int | None, image_size: int | None, steps: int, batches: bool) -> Report:
    """Train a ResNet-50 exactly and at ActNN's levels: time, memory, largest batch.

    Measures the time of a step, memory, and on a GPU the largest batch, at L1 to L5 in turn, step by step. The bars, on
    a GPU from 32 images of 224x224 on: a step at L2 takes at most 1.15 times the exact step, and the largest batch of
    some level is at least 6 times the exact one.

    Example: fewbit bench levels --device cuda --batch 64 --image-size 224
    """
    images, pixels = _DEFAULTS[device]
    case = Case(batch or images, image_size or pixels, device)
    rows = measure(case, steps, batches=batches)
    return Report(report_of(case, steps, rows), lines_of(case, rows))


def report_of(case: Case, steps: int, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the measurement for JSON."""
    here = this_machine(case.device)
    return {
        "torch": here.torch,
        "threads": here.threads,
        "device": here.device,
        "network": "ResNet-50",
        "batch": case.batch,
        "image_size": case.size,
        "steps": steps,
        "rows": [row.to_dict() for row in rows],
        "met": met(case, rows),
    }


def lines_of(case: Case, rows: Sequence[Row]) -> list[str]:
    """Return a table of the levels, followed by a legend of its columns."""
    head = ("level", "ms", "of exact", "kept MiB", "less", "peak MiB", "less", "largest batch", "times")
    body = [
        (
            *(row.level, f"{row.ms:.1f}", f"{row.ratio:.2f}"),
            *(f"{row.kept / 2**20:.1f}", f"{row.kept_times:.1f}x", f"{row.peak / 2**20:.1f}", f"{row.peak_times:.1f}x"),
            "" if row.largest_batch is None else str(row.largest_batch),
            "" if row.batch_times is None else f"{row.batch_times:.1f}x",
        )
        for row in rows
    ]
    return [
        f"ResNet-50, {case.batch} images of {case.size}x{case.size}, {case.device}",
        *columns([head, *body], left=1),
        "",
        "Kept: from forward to backward, in host memory too. Peak: most that a step holds at once, beside what",
        "was there before it, such as weights and momentum.",
        *(f"{name}: bar met: {MET[value]}" for name, value in met(case, rows).items()),
    ]


def measure(case: Case, steps: int = 7, *, batches: bool = False, levels: Sequence[str] = CONTESTANTS) -> list[Row]:
    """Return a row for each level, the exact network first.

    Args:
        case: the problem.
        steps: timed steps of each network, after one warm-up.
        batches: whether to search for the largest batch too, on a GPU.
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
    trainings = {level: Training(level, case.device) for level in levels}
    images = trainings[levels[0]].images(case.batch, case.size)
    runs = {level: partial(training.step, images) for level, training in trainings.items()}
    times = take_turns(runs, steps, clock=clock_of(case.device), warm_up=1)
    return [replace(row, ms=1000 * times.median(row.level), ratio=times.ratio(row.level, to=levels[0])) for row in rows]


def met(case: Case, rows: Sequence[Row]) -> dict[str, bool]:
    """Return the bars and whether each is met; there are bars only on a GPU, for enough images to fill it."""
    if case.device != "cuda" or 3 * case.batch * case.size**2 < LEAST_ON_GPU:
        return {}
    bars = {f"{row.level} time": row.ratio <= TIME_BAR for row in rows if row.level == "L2"}
    tried = [row.batch_times for row in rows if row.batch_times is not None]
    return bars | ({"largest batch": max(tried) >= BATCH_BAR} if tried else {})


def _memory(level: str, case: Case, batches: bool) -> Row:
    """Return a row without times; its network is freed before returning."""
    _free(case.device)
    training = Training(level, case.device)
    images = training.images(case.batch, case.size)
    training.step(images)  # allocates momentum, compiles kernels, and lets mixed precision see a gradient
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
            swapped = batch * row.kept // case.batch if row.level in LEVELS and LEVELS[row.level].swaps else 0
            # The OS would kill a process whose swapped tensors take more than half of the host's free memory.
            if hasattr(os, "sysconf") and swapped > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
                raise RuntimeError(f"no room in host memory for {swapped / 2**30:.1f} GiB of swapped tensors")
            training.step(training.images(batch, case.size))
            if case.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:  # out of memory, or a size that a library does not accept
            failures.append(str(error).partition("\n")[0])
            raise

    largest = largest_batch_by_trial(step, RuntimeError, training.forget, TOLERANCE)
    return replace(row, largest_batch=largest, batch_times=1.0, stopped_by=failures[-1])


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
