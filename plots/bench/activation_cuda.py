"""`fewbit bench activation --device cuda`: speed on a GPU beside eager torch, compiled torch and a copy, in one run.

An activation is bound by memory bandwidth, so the yardstick is a device-to-device copy: GB/s count the bytes that must
move (x, y and the code forward; gradient, code and result backward; for torch the gradient, x and the result), and a
row's share is its GB/s divided by the copy's.

Times are GPU times, medians over rounds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...cli.progress import with_progress
from ...runtime.activations.modules import GELU
from ...runtime.backends.cuda.codegen import compiler, kernel_source
from ...runtime.tensors.packing import packed_size
from ...tables import FewbitError, load_table
from ...tables.columns import columns
from .kept import kept_bytes
from .report import Report
from .timing import Run, clock_of, gpu_alone, processor, repeated, take_turns

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = (2**20, 2**22, 2**24, 2**26, 2**28, 2**29)
BITS = (1, 2, 3, 4, 8)
SMALL = 1000
_WARM_UP = 3
_CALLS = 200


@dataclass(frozen=True)
class Row:
    """Time of one contestant for one pass.

    Attributes:
        who: ``fewbit``, ``torch``, ``compiled`` or ``copy``.
        which: ``forward``, ``backward`` or ``both``; ``copy`` for the copy.
        dtype, n: dtype and number of elements of the tensor.
        bits: bits kept per element; for torch those of the dtype.
        ms: median milliseconds.
        gbs: bytes that must move / time, in 1e9 bytes per second.
        share: gbs / the copy's gbs.
        kept: bytes that one call saves for backward, without the result; None if not measured.
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
    """Microseconds of forward and backward on 1,000 elements: called from Python, and replayed from a CUDA graph."""

    fewbit_us: float
    torch_us: float
    fewbit_graph_us: float | None
    torch_graph_us: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class FirstUse:
    """Milliseconds until the kernels of a new table are ready: compiled, and loaded from the disk cache."""

    compiled_ms: float
    cached_ms: float

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


def cuda_report(
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    bits: int | None = None,
    rounds: int = 30,
) -> Report:
    """Measure GELU on the GPU.

    Args:
        dtype, shape, bits: restrict the measurement; None measures all.
        rounds: timings of each.

    Raises:
        FewbitError: an argument is invalid.
    """
    if dtype is not None and dtype not in DTYPES:
        raise FewbitError(f"dtype must be one of {', '.join(DTYPES)} on a GPU, not {dtype!r}")
    sizes = SIZES if shape is None else (math.prod(shape),)
    cases = [(one, n) for one in ([dtype] if dtype else DTYPES) for n in sizes]
    rows: list[Row] = []
    for one, n in with_progress(cases, len(cases), "measuring"):
        rows += bench_gelu(one, n, BITS if bits is None else (bits,), rounds)
        torch.cuda.empty_cache()
    small = bench_small()
    properties = torch.cuda.get_device_properties(0)
    first = bench_first_use(f"sm_{properties.major}{properties.minor}")
    reached = list(bars(rows, small))
    values = {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rows": [row.to_dict() for row in rows],
        "small": small.to_dict(),
        "first_use": first.to_dict(),
        "bars": [{"bar": bar, "measured": value, "met": met} for bar, value, met in reached],
    }
    lines = [
        f"{properties.name}, torch {torch.__version__}, GELU",
        *_row_lines(rows),
        "",
        f"a new table: {first.compiled_ms:.0f} ms to compile, {first.cached_ms:.1f} ms from the cache",
        "",
        *(f"{'met' if met else 'not met':8}{bar}: {value}" for bar, value, met in reached),
    ]
    return Report(values, lines)


def bars(rows: Iterable[Row], small: Small) -> Iterable[tuple[str, str, bool]]:
    """Yield each target for a GPU like the H200, the measured value, and whether it meets the target."""
    at = {(row.who, row.which, row.bits): row for row in rows if (row.dtype, row.n) == ("bfloat16", 2**28)}
    for which in ("forward", "backward"):
        row = at.get(("fewbit", which, 3))
        if row:
            yield f"{which}, bfloat16, 2^28, 3 bits: at least 0.90 of the copy", f"{row.share:.3f}", row.share >= 0.9
    ours, theirs = at.get(("fewbit", "both", 3)), at.get(("torch", "both", 16))
    if ours and theirs:
        ratio = theirs.ms / ours.ms
        yield "forward and backward together: at least 1.10 times as fast as torch", f"{ratio:.3f}", ratio >= 1.1
        if ours.kept and theirs.kept:
            kept = ours.kept / theirs.kept
            yield "3/16 of torch's saved memory", f"{kept:.4f}", kept <= 3 / 16 + 1e-6
    for b in (4, 8):
        other = at.get(("fewbit", "both", b))
        if ours and other:
            ratio = other.ms / ours.ms
            yield f"{b} bits: at most 1.05 times the time of 3 bits", f"{ratio:.3f}", ratio <= 1.05
    more = small.fewbit_us - small.torch_us
    yield "1,000 elements: at most 20 µs more than torch", f"{more:.1f} µs", more <= 20
    if small.fewbit_graph_us is not None and small.torch_graph_us is not None:
        ratio = small.fewbit_graph_us / small.torch_graph_us
        yield "1,000 elements in a CUDA graph: no more than torch", f"{ratio:.2f} times", ratio <= 1.0


def _row_lines(rows: Iterable[Row]) -> Iterable[str]:
    head = ("dtype", "who", "pass", "n", "bits", "ms", "GB/s", "of the copy", "MiB kept")
    body = [
        (
            *(row.dtype, row.who, row.which),
            *(f"2^{row.n.bit_length() - 1}" if row.n.bit_count() == 1 else f"{row.n:,}", str(row.bits or "")),
            *(f"{row.ms:.4f}", f"{row.gbs:,.0f}", f"{row.share:.3f}"),
            "" if row.kept is None else f"{row.kept / 2**20:,.1f}",
        )
        for row in rows
    ]
    return columns([head, *body], left=3)


def bench_gelu(
    dtype: str, n: int, bits: Sequence[int] = BITS, rounds: int = 30, compiled: bool = True, device: str = "cuda"
) -> Iterator[Row]:
    """Yield the rows of GELU on `n` elements: a copy, torch, compiled torch, and fewbit at each number of bits.

    Args:
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        n: number of elements, drawn from a normal distribution.
        bits: numbers of bits, 1 to 8 each.
        rounds: timings of each contestant.
        compiled: whether to time torch.compile too.
        device: ``cuda``, or ``cpu`` with the processor's clock.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(n, generator=generator, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    x.requires_grad_()
    size = x.element_size()
    contestants: dict[tuple[str, str, int], tuple[Run, int]] = {}
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
    runs = {key: run for key, (run, _) in contestants.items()}
    times = take_turns(runs, rounds, clock=gpu_alone if device == "cuda" else processor, warm_up=_WARM_UP)
    copy_gbs = 2 * n * size / times.median(("copy", "copy", 0)) / 1e9
    kept = {b: kept_bytes(GELU(bits=b), x) for b in bits} | {size * 8: kept_bytes(F.gelu, x)}
    for (who, which, b), (_, moved) in contestants.items():
        seconds = times.median((who, which, b))
        gbs = moved / seconds / 1e9
        held = kept[b] if which == "both" and who != "compiled" else None
        yield Row(who, which, dtype, n, b, seconds * 1e3, gbs, gbs / copy_gbs, held)


def bench_small(dtype: str = "bfloat16", bits: int = 3, rounds: int = 15, device: str = "cuda") -> Small:
    """Return the time of forward and backward on 1,000 elements, where call and launch overhead dominate."""
    x = torch.randn(SMALL, device=device, dtype=DTYPES[dtype]).requires_grad_()
    grad = torch.randn_like(x.detach())
    ours, theirs = (_passes(function, x, grad)["both"] for function in (GELU(bits=bits), F.gelu))

    def microseconds(*runs: Run) -> list[float]:
        repeats = {i: repeated(run, _CALLS) for i, run in enumerate(runs)}
        times = take_turns(repeats, rounds, clock=clock_of(device), warm_up=_WARM_UP)
        return [times.median(i) * 1e6 / _CALLS for i in repeats]

    called = microseconds(ours, theirs)
    in_graph = microseconds(_graph(ours), _graph(theirs)) if device == "cuda" else (None, None)
    return Small(*called, *in_graph)


def bench_first_use(arch: str, dtype: str = "bfloat16") -> FirstUse:
    """Return how long NVRTC, and how long the cache, takes to provide the two kernels for training with a new table."""
    table = load_table("gelu", bits=3)
    sources = [kernel_source(table, dtype, ["forward"], "gelu"), kernel_source(table, dtype, ["multiply"])]
    compiler.compile_source(sources[1], arch)  # loads the compiler itself
    compiled = processor(lambda: [compiler.compile_source(source, arch) for source in sources])
    for source in sources:
        compiler.cubin(source, arch)
    cached = processor(lambda: [compiler.cubin(source, arch) for source in sources])
    return FirstUse(compiled * 1e3, cached * 1e3)


def _passes(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict[str, Run]:
    y = function(x)
    return {
        "forward": lambda: function(x),
        "backward": lambda: torch.autograd.grad(y, x, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(function(x), x, grad),
    }


def _moved(which: str, forward: int, backward: int) -> int:
    return {"forward": forward, "backward": backward, "both": forward + backward}[which]


def _graph(run: Run) -> Run:
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
