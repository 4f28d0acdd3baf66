"""`fewbit bench kernel-times`: each CUDA kernel on one large tensor, beside a copy of it in the same rounds.

Kernels of this kind are bound by memory, so the yardstick is the copy: bytes that must move (what is read and written
once), divided by the time, and as a share of the copy's bytes per second. Times are the GPU's own, between two events
that stand behind work which hides Python and the launch (`timing.gpu_alone`); medians over rounds. Each is called some
times in a row, so that it pays for its own lines of the cache that wait to be written, and not for those of the copy
before it. A call that takes several kernels is timed as a whole, and the profiler says which of them takes how long.

    for row in measure("bfloat16", 2**26, "cuda"): row.case, row.us, row.share, row.kernels
"""

import fnmatch
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor

from ... import functional
from ...runtime import ops
from ...runtime.activations.modules import GELU
from ...runtime.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from ...tables.columns import columns
from .report import Report, bench_command, rounds_option, this_machine
from .timing import Run, gpu_alone, processor, repeated, take_turns

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BAR = 0.9  # share of the copy of kernels that move more than a byte an element
_FEATURES = 4096  # a row: 16 groups of 256
_WARM_UP = 3
# In a row. After one call alone a copy's 50 MB in the cache of an H100 were written during the next: quantizing 2^26
# numbers to 4 bits took 67 µs behind a copy, 59 by the profiler.
_CALLS = 4
_CLOCKS = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Row:
    """Time of one call.

    Attributes:
        case: the quantizer or function, its bits, and the pass.
        dtype: of the tensor.
        bytes: that must move for an element, read or written.
        us, copy_us: median microseconds, and those of the copy in the same rounds.
        gbs: 1e9 bytes per second.
        share: of the copy's bytes per second.
        kernels: microseconds of each kernel, once, as the profiler has them; empty where it has none.
        error: what the call raised; the numbers are then 0.
    """

    case: str
    dtype: str
    bytes: float = 0
    us: float = 0
    copy_us: float = 0
    gbs: float = 0
    share: float = 0
    kernels: dict[str, float] | None = None
    error: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the share is `BAR`; None if the call failed or moves too little for the bar."""
        return None if self.error or self.bytes <= 1 else self.share >= BAR

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `met` as JSON values."""
        return {**asdict(self), "met": self.met}


@bench_command("kernel-times", device=True)
@click.argument("cases", metavar="[CASE]...", nargs=-1)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(tuple(DTYPES)), help="[default: bfloat16, float32]")
@click.option(
    *("--elements", "n"),
    type=click.IntRange(_FEATURES, 2**31),
    metavar="N",
    default=2**26,
    show_default=True,
    help=f"Of the tensor, a multiple of {_FEATURES}.",
)
@click.option(
    "--seconds", type=float, default=85, show_default=True, metavar="N", help="No further case begins after so many."
)
@rounds_option(20)
def command(
    cases: tuple[str, ...], dtypes: tuple[str, ...], n: int, seconds: float, rounds: int, device: str
) -> Iterator[Report]:
    """Time every kernel on one large tensor beside a copy of it.

    CASE is a pattern such as 'PerGroup*4*'. The bar: 0.9 of the copy's bytes per second for what moves more than a byte
    an element. What a kernel raises stands in its row, and the others are measured. Results are written as they come.

    Example: fewbit bench kernel-times --device cuda -o kernel-times.json
    """
    begun, before = time.perf_counter(), _clocks()
    rows: list[Row] = []
    for dtype in dtypes or ("bfloat16", "float32"):
        for row in measure(dtype, n // _FEATURES * _FEATURES, device, cases or ("*",), rounds, begun + seconds):
            rows.append(row)
            yield _report(rows, n, device, {"before": before, "after": _clocks()})
    yield _report(rows, n, device, {"before": before, "after": _clocks()})


def measure(
    dtype: str, n: int, device: str, patterns: Sequence[str] = ("*",), rounds: int = 20, until: float | None = None
) -> Iterator[Row]:
    """Yield a row for each case whose name matches one of `patterns`.

    Args:
        dtype: a name in `DTYPES`.
        n: number of elements, a multiple of 4,096.
        device: ``cuda``, or ``cpu`` with the processor's clock.
        patterns: as of a shell.
        rounds: timings of each.
        until: `time.perf_counter()` after which no case is measured; each has an error instead.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n // _FEATURES, _FEATURES, generator=generator, device=device, dtype=DTYPES[dtype])
    for case, prepare in _cases().items():
        if not any(fnmatch.fnmatch(case, pattern) for pattern in patterns):
            continue
        try:
            if until is not None and time.perf_counter() > until:
                raise TimeoutError("not measured: out of time")
            yield _time(case, dtype, x, *prepare(x), rounds)
        except Exception as error:  # of a kernel; the others are measured
            yield Row(case, dtype, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _time(case: str, dtype: str, x: Tensor, run: Run, moved: int, rounds: int) -> Row:
    """Time a call that moves so many bytes, beside the copy of `x`."""
    target = torch.empty_like(x)
    on_gpu = x.is_cuda
    calls: dict[str, Run] = {"copy": lambda: target.copy_(x), "case": run}
    contestants = {name: repeated(call, _CALLS) for name, call in calls.items()}
    times = take_turns(contestants, rounds, clock=gpu_alone if on_gpu else processor, warm_up=_WARM_UP)
    seconds, copy = times.median("case") / _CALLS, times.median("copy") / _CALLS
    copied = 2 * x.numel() * x.element_size()
    share = moved / copied / times.ratio("case", to="copy")
    kernels = _kernels(run) if on_gpu else None
    return Row(case, dtype, moved / x.numel(), seconds * 1e6, copy * 1e6, moved / seconds / 1e9, share, kernels)


# ---- the cases: name -> what prepares the call on x, and returns it with the bytes that it must move -----------------

Prepare = Callable[[Tensor], tuple[Run, int]]


def _cases() -> dict[str, Prepare]:
    """Return all cases; what they share is compiled when the first of them is prepared."""
    cases: dict[str, Prepare] = {}
    for bits in (4, 2, 8):
        cases[f"PerGroup {bits} quantize nearest"] = lambda x, b=bits: _per_group(x, b, None)
        cases[f"PerGroup {bits} quantize"] = lambda x, b=bits: _per_group(x, b, 1)
        cases[f"PerGroup {bits} dequantize"] = lambda x, b=bits: _decompress(x, PerGroup(bits=b))
    cases["PerGroup 4 fitted quantize"] = lambda x: _per_group(x, 4, 1, "fitted")
    cases["PerGroup 4 fitted dequantize"] = lambda x: _decompress(x, PerGroup(bits=4, levels="fitted"))
    gelu, stochastic = GELU(bits=3), GELU(bits=3, rounding="stochastic")
    cases["GELU 3 forward"] = lambda x: _forward([x], gelu, 3)
    cases["GELU 3 backward"] = lambda x: _backward([x], gelu, 3)
    cases["GELU 3 stochastic forward"] = lambda x: _forward([x], stochastic, 3)
    cases["swiglu 3+4+4 forward"] = lambda x: _forward([x, x], functional.swiglu, 11)
    cases["swiglu 3+4+4 backward"] = lambda x: _backward([x, x], functional.swiglu, 11)
    cases["Outlier 3 quantize"] = lambda x: _compress(x, Outlier(bits=3))
    cases["Outlier 3 dequantize"] = lambda x: _decompress(x, Outlier(bits=3))
    cases["FixedPoint 4 quantize"] = lambda x: _compress(x, FixedPoint(bits=4), **_channels(x))
    cases["FixedPoint 4 dequantize"] = lambda x: _decompress(x, FixedPoint(bits=4), **_channels(x))
    for bits in (4, 2):  # last, for they take longest to compile
        cases[f"Rotated {bits} quantize"] = lambda x, b=bits: _compress(x, Rotated(bits=b))
        cases[f"Rotated {bits} dequantize"] = lambda x, b=bits: _decompress(x, Rotated(bits=b))
    return cases


def _per_group(x: Tensor, bits: int, seed: int | None, levels: str = "uniform") -> tuple[Run, int]:
    """Return the op itself, to nearest without a seed; its results tell the bytes."""
    key = None if seed is None else torch.tensor([seed], device="cpu")

    def run() -> Sequence[Tensor]:
        return ops.per_group_quantize(x, bits, 256, key, levels)

    return run, _size(x) + sum(_size(part) for part in run())


def _compress(x: Tensor, quantizer: Any, **arguments: Any) -> tuple[Run, int]:
    return lambda: quantizer.compress(x, **arguments), _size(x) + quantizer.compress(x, **arguments).nbytes


def _decompress(x: Tensor, quantizer: Any, **arguments: Any) -> tuple[Run, int]:
    compressed = quantizer.compress(x, **arguments)
    return compressed.decompress, _size(x) + compressed.nbytes


def _channels(x: Tensor) -> dict[str, Tensor]:
    ones = torch.ones(x.shape[1], device=x.device)
    return {"scale": ones, "shift": 0 * ones}


def _forward(inputs: Sequence[Tensor], function: Callable[..., Tensor], bits: int) -> tuple[Run, int]:
    """Return the call where gradients are wanted, which saves `bits` an element."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]  # not one memory, which would be read once
    return lambda: function(*leaves), (len(inputs) + 1) * _size(leaves[0]) + leaves[0].numel() * bits // 8


def _backward(inputs: Sequence[Tensor], function: Callable[..., Tensor], bits: int) -> tuple[Run, int]:
    """Return the backward pass, which reads the gradient and `bits` an element, and writes a gradient of each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    grad = torch.ones_like(inputs[0])
    moved = (len(inputs) + 1) * _size(grad) + grad.numel() * bits // 8
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True), moved


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


# ---- what is reported ------------------------------------------------------------------------------------------------


def _kernels(run: Run) -> dict[str, float]:
    """Return the microseconds of each kernel of a call; empty where the profiler cannot trace the GPU."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return {event.key: event.device_time_total for event in profile.key_averages() if event.device_time_total}
    except Exception:  # the tracing library of the driver may be missing or forbidden: the times stand without it
        return {}


def _clocks() -> dict[str, str]:
    """Return driver, clocks in MHz and power as nvidia-smi has them; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = answer.splitlines()[0] if answer.strip() else ""
    return dict(zip(_CLOCKS.split(","), (value.strip() for value in first.split(",")), strict=False))


def _report(rows: Sequence[Row], n: int, device: str, clocks: dict[str, Any]) -> Report:
    here = this_machine(device)
    values = {
        "torch": here.torch,
        "cuda": torch.version.cuda,
        "device": here.where,
        "clocks": clocks,
        "elements": n,
        "rows": [row.to_dict() for row in rows],
    }
    head = ("dtype", "case", "bytes/element", "µs", "copy µs", "GB/s", "of the copy", f"{BAR} met")
    body = [_cells(row) for row in rows if row.error is None]
    failed = [f"{row.dtype} {row.case}: {row.error}" for row in rows if row.error is not None]
    lines = [f"{here.where}, torch {here.torch}, {n:,} elements", *columns([head, *body], left=2), *failed]
    return Report(values, lines)


def _cells(row: Row) -> tuple[str, ...]:
    met = {None: "", True: "yes", False: "no"}[row.met]
    return (
        *(row.dtype, row.case, f"{row.bytes:.3f}", f"{row.us:.1f}", f"{row.copy_us:.1f}"),
        *(f"{row.gbs:,.0f}", f"{row.share:.3f}", met),
    )
