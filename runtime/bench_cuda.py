"""Speed of the few-bit activations on a GPU, beside torch eager, torch compiled and a copy measured in the same run.

An activation moves bytes and does little else, so the yardstick is a device-to-device copy: GB/s count the bytes that
must move (x, y and the code forward; gradient, code and result backward; for torch the gradient, x and the result), and
a row's share is its GB/s by the copy's.

Times are those of the GPU itself, between two of its events; medians over rounds, in which all contestants take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tables import load_table
from .activations.modules import GELU
from .backends.cuda.codegen import compiler, kernel_source
from .tensors.packing import packed_size

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = (2**20, 2**22, 2**24, 2**26, 2**28, 2**29)
BITS = (1, 2, 3, 4, 8)
SMALL = 1000
_WARM_UP = 3
_CALLS = 200
_Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """How long one contestant took for one pass.

    Attributes:
        who: ``fewbit``, ``torch``, ``compiled`` or ``copy``.
        which: ``forward``, ``backward`` or ``both``; of a copy ``copy``.
        dtype, n: of the tensor, n elements.
        bits: kept per element; for torch those of the dtype.
        ms: median milliseconds.
        gbs: bytes that must move / time, 1e9 bytes a second.
        share: gbs / the copy's gbs.
        kept: bytes that one call keeps for its backward pass, without the result; None where it was not measured.
    """

    who: str
    which: str
    dtype: str
    n: int
    bits: int
    ms: float
    gbs: float
    share: float
    kept: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Small:
    """Microseconds of forward and backward on 1,000 elements: called from Python, and replayed in a CUDA graph."""

    fewbit_us: float
    torch_us: float
    fewbit_graph_us: float | None
    torch_graph_us: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class FirstUse:
    """Milliseconds until a new table's forward and backward kernels are there: compiled, and from the disk cache."""

    compiled_ms: float
    cached_ms: float

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


def bench_gelu(
    dtype: str, n: int, bits: Sequence[int] = BITS, rounds: int = 30, compiled: bool = True, device: str = "cuda"
) -> Iterator[Row]:
    """Yield the rows of GELU on `n` elements: a copy, torch, torch compiled, fewbit at each number of bits.

    Args:
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        n: elements; normal values.
        bits: 1 to 8 each.
        rounds: how often each is timed.
        compiled: whether torch.compile takes part.
        device: ``cuda``; on ``cpu`` the clock is the processor's.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(n, generator=generator, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    x.requires_grad_()
    size = x.element_size()
    contestants: dict[tuple[str, str, int], tuple[_Run, int]] = {}
    to = torch.empty_like(grad)
    contestants["copy", "copy", 0] = (lambda: to.copy_(grad), 2 * n * size)
    theirs: dict[str, Callable[[Tensor], Tensor]] = {"torch": F.gelu}
    if compiled:
        theirs["compiled"] = torch.compile(F.gelu)
    for who, function in theirs.items():
        for which, run in _passes(function, x, grad).items():
            contestants[who, which, size * 8] = (run, _moved(which, 2 * n * size, 3 * n * size))
    for b in bits:
        moves = 2 * n * size + packed_size(n, b)
        for which, run in _passes(GELU(bits=b), x, grad).items():
            contestants["fewbit", which, b] = (run, _moved(which, moves, moves))
    times = _take_turns({key: run for key, (run, _) in contestants.items()}, rounds, device)
    copy_gbs = 2 * n * size / times["copy", "copy", 0] / 1e9
    kept = {b: _kept(GELU(bits=b), x) for b in bits} | {size * 8: _kept(F.gelu, x)}
    for (who, which, b), (_, moved) in contestants.items():
        seconds = times[who, which, b]
        gbs = moved / seconds / 1e9
        held = kept[b] if which == "both" and who != "compiled" else None
        yield Row(who, which, dtype, n, b, seconds * 1e3, gbs, gbs / copy_gbs, held)


def bench_small(dtype: str = "bfloat16", bits: int = 3, rounds: int = 15, device: str = "cuda") -> Small:
    """Return what forward and backward cost on 1,000 elements, where calls and launches are all there is."""
    x = torch.randn(SMALL, device=device, dtype=DTYPES[dtype]).requires_grad_()
    grad = torch.randn_like(x.detach())
    ours, theirs = (_passes(function, x, grad)["both"] for function in (GELU(bits=bits), F.gelu))

    def many(run: _Run) -> _Run:
        return lambda: [run() for _ in range(_CALLS)]

    times = _take_turns({"fewbit": many(ours), "torch": many(theirs)}, rounds, "cpu", device)
    graphs: dict[str, float] = {}
    if device == "cuda":
        replays = {"fewbit": many(_graph(ours)), "torch": many(_graph(theirs))}
        graphs = _take_turns(replays, rounds, "cpu", device)
    us = 1e6 / _CALLS
    in_graph = [graphs[who] * us if who in graphs else None for who in ("fewbit", "torch")]
    return Small(times["fewbit"] * us, times["torch"] * us, *in_graph)


def bench_first_use(arch: str, dtype: str = "bfloat16") -> FirstUse:
    """Return how long NVRTC takes for the two kernels that training with a new table needs, and how long the cache."""
    table = load_table("gelu", bits=3)
    sources = [kernel_source(table, dtype, ["forward"], "gelu"), kernel_source(table, dtype, ["multiply"])]
    compiler.compile_source(sources[1], arch)  # the compiler itself is loaded
    compiled = _seconds(lambda: [compiler.compile_source(source, arch) for source in sources])
    for source in sources:
        compiler.cubin(source, arch)
    cached = _seconds(lambda: [compiler.cubin(source, arch) for source in sources])
    return FirstUse(compiled * 1e3, cached * 1e3)


def _seconds(run: _Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _passes(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict[str, _Run]:
    y = function(x)
    return {
        "forward": lambda: function(x),
        "backward": lambda: torch.autograd.grad(y, x, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(function(x), x, grad),
    }


def _moved(which: str, forward: int, backward: int) -> int:
    return {"forward": forward, "backward": backward, "both": forward + backward}[which]


def _kept(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes of what a call saves for its backward pass."""
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        function(x)
    return sum(storages.values())


def _take_turns(runs: dict[Any, _Run], rounds: int, clock: str, device: str | None = None) -> dict[Any, float]:
    """Return the median seconds of each run; `clock` is the device whose time counts."""
    timed = _by_events if clock == "cuda" else _by_the_processor
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for i in range(_WARM_UP + rounds):
        for key, run in runs.items():
            seconds = timed(run, device or clock)
            if i >= _WARM_UP:
                times[key].append(seconds)
    return {key: statistics.median(found) for key, found in times.items()}


def _by_events(run: _Run, _: str) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU is kept busy while Python gets ahead, so that only its own time lies between the events.
    torch.cuda._sleep(1_000_000)
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    del result
    return begin.elapsed_time(end) / 1e3


def _by_the_processor(run: _Run, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()

    def finish() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    return _seconds(finish)


def _graph(run: _Run) -> _Run:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


__all__ = ["BITS", "DTYPES", "SIZES", "FirstUse", "Row", "Small", "bench_first_use", "bench_gelu", "bench_small"]
