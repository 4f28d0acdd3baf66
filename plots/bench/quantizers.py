"""`fewbit bench quantizers`: speed of the per-group quantizer beside a memory copy and the plain torch reference.

The best round of each counts, the one that other work on the machine disturbed least. Medians are listed beside it.

        copy      into allocated memory: the basis of the bar, run twice to compare with compress plus decompress
        clone     into new memory, as user code copies: on the CPU the system has to map and clear it first, if large
                  (decompress reuses the memory of the last freed result: tensors/host_memory.py)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch

from ...cli.options import BitsList
from ...cli.progress import with_progress
from ...runtime.backends.cpu import per_group as cpu
from ...runtime.backends.cuda import per_group as cuda
from ...runtime.backends.reference import per_group as reference
from ...runtime.quantizers import PerGroup
from ...tables.columns import columns
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import Run, gpu_events, processor, take_turns

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIR_BAR = 0.60  # of the speed of two copies, on the CPU
REFERENCE_BAR = 10.0  # times the speed of the reference
FITTED_BAR = 1.10  # fitted levels relative to uniform ones
GPU_BAR = 0.80  # of the copy's bandwidth, for compress and for decompress
_SAMPLES = 64
_REFERENCE_ROUNDS = 2


@dataclass(frozen=True)
class QuantizerTiming:
    """Milliseconds: best of the rounds, with their medians in `medians`.

    Attributes:
        dtype, n, bits: problem; n elements in 64 samples.
        device: device of the tensor.
        compress_ms, decompress_ms: each separately.
        pair_ms: compress followed by decompress.
        ready_ms: the same with the result in allocated memory, as for the copy: the time of the kernels themselves.
        fitted_ms: compress followed by decompress by fitted levels.
        copy_ms, clone_ms: one copy of the tensor, into allocated and into new memory.
        reference_ms: compress and decompress by the reference.
        medians: the medians of all these.
        share, ready_share: time of two copies divided by `pair_ms` and by `ready_ms`.
        compress_share, decompress_share: bandwidth relative to the copy's.
        times_reference: `reference_ms` divided by `pair_ms`.
        fitted_ratio: `fitted_ms` divided by `pair_ms`.
    """

    dtype: str
    n: int
    bits: int
    device: str
    compress_ms: float
    decompress_ms: float
    pair_ms: float
    ready_ms: float
    fitted_ms: float
    copy_ms: float
    clone_ms: float
    reference_ms: float
    medians: dict[str, float]
    share: float
    ready_share: float
    compress_share: float
    decompress_share: float
    times_reference: float
    fitted_ratio: float

    def met(self) -> dict[str, bool]:
        """Return the bars and whether each is met."""
        if self.device == "cuda":
            return {"compress": self.compress_share >= GPU_BAR, "decompress": self.decompress_share >= GPU_BAR}
        return {
            "copies": self.share >= PAIR_BAR,
            "reference": self.times_reference >= REFERENCE_BAR,
            "fitted": self.fitted_ratio <= FITTED_BAR,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return asdict(self) | {"met": self.met()}


@bench_command("quantizers", threads=True, device=True)
@click.option(
    "--bits", type=BitsList(), metavar="N,...", default="2,4", show_default=True, help="Bits per element, each 1 to 8."
)
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="float32", show_default=True)
@click.option("--mib", type=click.IntRange(1, 65536), default=64, show_default=True, help="Size of the tensor.")
@rounds_option()
def command(bits: tuple[int, ...], dtype: str, mib: int, rounds: int, device: str) -> Report:
    """Time ActNN's per-group quantizer beside copies of the same memory.

    Times the kernels, the reference in plain torch and copies in turn, and prints milliseconds of the best round. The
    bars: on the CPU quantize and dequantize together reach 0.60 of the speed of two copies into allocated memory and 10
    times that of the reference; on a GPU each reaches 0.80 of a copy's bandwidth.

    Example: fewbit bench quantizers --bits 2,4 --threads 2
    """
    n = mib * 2**20 // DTYPES[dtype].itemsize
    timings = [bench_per_group(b, dtype, n, device, rounds) for b in with_progress(bits, len(bits), "measuring")]
    here = this_machine(device)
    values = {"torch": here.torch, "device": here.where, "mib": mib, "timings": [t.to_dict() for t in timings]}
    return Report(values, [f"torch {here.torch}, {here.where}, {mib} MiB of {dtype}", *_lines(timings)])


def bench_per_group(bits: int, dtype: str, n: int, device: str = "cpu", rounds: int = 15) -> QuantizerTiming:
    """Time `PerGroup(bits)` on normal numbers.

    Args:
        bits: 1 to 8.
        dtype: a name in `DTYPES`.
        n: number of elements, rounded down to a multiple of 64, the number of samples.
        device: ``cpu`` or ``cuda``.
        rounds: timings of all contestants but the reference, which takes two.
    """
    D = max(1, n // _SAMPLES)
    x = torch.randn(_SAMPLES, D, dtype=torch.float32).to(DTYPES[dtype]).to(device)
    ready, quantizer, fitted = torch.empty_like(x), PerGroup(bits), PerGroup(bits, levels="fitted")
    compressed = quantizer.compress(x)
    compressed.decompress()
    clock = gpu_events if device == "cuda" else processor

    def pair() -> object:
        return quantizer.compress(x).decompress()

    def ready_pair() -> None:
        kept = quantizer.compress(x)
        kernels = cuda if device == "cuda" else cpu
        kernels.dequantize(kept.packed, kept.minimum, kept.range, bits, quantizer.group_size, ready)

    contestants: dict[str, Run] = {
        "compress": lambda: quantizer.compress(x),
        "decompress": compressed.decompress,
        "pair": pair,
        "fitted": lambda: fitted.compress(x).decompress(),
        "ready": ready_pair,
        "copy": lambda: ready.copy_(x),
        "clone": lambda: x.clone(),
    }
    slow: dict[str, Run] = {"reference": lambda: _reference(quantizer, x)}
    times = {
        **dict.fromkeys(contestants, take_turns(contestants, rounds, clock=clock, warm_up=0)),
        **dict.fromkeys(slow, take_turns(slow, _REFERENCE_ROUNDS, clock=clock, warm_up=0)),
    }
    best = {name: 1e3 * found.best(name) for name, found in times.items()}
    bytes_of = x.numel() * x.element_size()
    moved = (bytes_of + compressed.nbytes) / (2 * bytes_of)  # relative to a copy
    return QuantizerTiming(
        *(dtype, x.numel(), bits, device, best["compress"], best["decompress"], best["pair"]),
        *(best["ready"], best["fitted"]),
        *(best["copy"], best["clone"], best["reference"]),
        medians={name: 1e3 * found.median(name) for name, found in times.items()},
        share=2 * best["copy"] / best["pair"],
        ready_share=2 * best["copy"] / best["ready"],
        compress_share=moved * best["copy"] / best["compress"],
        decompress_share=moved * best["copy"] / best["decompress"],
        times_reference=best["reference"] / best["pair"],
        fitted_ratio=best["fitted"] / best["pair"],
    )


def _reference(quantizer: PerGroup, x: torch.Tensor) -> torch.Tensor:
    kept = reference.quantize(x, quantizer.bits, quantizer.group_size, 1)
    out = torch.empty_like(x)
    reference.dequantize(*kept, quantizer.bits, quantizer.group_size, out)
    return out


def _lines(timings: Sequence[QuantizerTiming]) -> list[str]:
    times = ("compress ms", "decompress ms", "pair ms", "in ready memory", "copy ms", "clone ms", "reference ms")
    shares = (
        "2 copies / pair",
        "in ready memory",
        "compress GB/s share",
        "decompress GB/s share",
        "reference / pair",
        "fitted / pair",
        "bars met",
    )
    body = []
    for t in timings:
        shown = (t.compress_ms, t.decompress_ms, t.pair_ms, t.ready_ms, t.copy_ms, t.clone_ms, t.reference_ms)
        ratios = (t.share, t.ready_share, t.compress_share, t.decompress_share, t.times_reference, t.fitted_ratio)
        met = ", ".join(f"{name} {MET[reached]}" for name, reached in t.met().items())
        body.append((str(t.bits), *(f"{v:.2f}" for v in (*shown, *ratios)), met))
    return list(columns([("bits", *times, *shares), *body], left=1))
