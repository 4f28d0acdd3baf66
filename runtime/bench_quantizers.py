"""Speed of the per-group quantizer beside a copy of memory and the reference in plain torch, measured in one run.

All contestants take turns, round by round, so that a machine whose speed drifts slows them alike. What counts is the
best round of each: on a machine that does other work too, it is the one that was disturbed least. Medians stand beside.

    copy      into memory that is ready: what the bar is measured by, twice for compress and decompress together
    clone     into fresh memory, as a user copies: on the CPU the system has to map and clear it first, if it is large
              (decompress takes the memory of the last result that is gone: backends/host_memory.py)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .backends.cpu import per_group as cpu
from .backends.cuda import per_group as cuda
from .backends.reference import per_group as reference
from .quantizers import PerGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIR_BAR = 0.60  # of the speed of two copies, on the CPU
REFERENCE_BAR = 10.0  # times the speed of the reference
GPU_BAR = 0.80  # of the copy's bandwidth, compress and decompress each
_SAMPLES = 64
_REFERENCE_ROUNDS = 2


@dataclass(frozen=True)
class QuantizerTiming:
    """Milliseconds, each the best of the rounds and in `medians` their median.

    Attributes:
        dtype, n, bits: of what was compressed; n elements in 64 samples.
        device: where.
        compress_ms, decompress_ms: each alone.
        pair_ms: one after the other.
        ready_ms: the same with the result in ready memory, as the copy's: what the kernels themselves take.
        copy_ms, clone_ms: of one copy of the tensor, into ready and into fresh memory.
        reference_ms: compress and decompress by the reference.
        medians: of the same.
        share, ready_share: two copies by a pair, and by one into ready memory.
        compress_share, decompress_share: bandwidth by the copy's.
        times_reference: reference by pair.
    """

    dtype: str
    n: int
    bits: int
    device: str
    compress_ms: float
    decompress_ms: float
    pair_ms: float
    ready_ms: float
    copy_ms: float
    clone_ms: float
    reference_ms: float
    medians: dict[str, float]
    share: float
    ready_share: float
    compress_share: float
    decompress_share: float
    times_reference: float

    def met(self) -> dict[str, bool]:
        """Return which bars there are, and whether they are met."""
        if self.device == "cuda":
            return {"compress": self.compress_share >= GPU_BAR, "decompress": self.decompress_share >= GPU_BAR}
        return {"copies": self.share >= PAIR_BAR, "reference": self.times_reference >= REFERENCE_BAR}

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return asdict(self) | {"met": self.met()}


def bench_per_group(bits: int, dtype: str, n: int, device: str = "cpu", rounds: int = 15) -> QuantizerTiming:
    """Time `PerGroup(bits)` on normal numbers.

    Args:
        bits: 1 to 8.
        dtype: a name in `DTYPES`.
        n: elements, rounded down to a multiple of 64, the samples.
        device: ``cpu`` or ``cuda``.
        rounds: of all but the reference, which takes two.
    """
    D = max(1, n // _SAMPLES)
    x = torch.randn(_SAMPLES, D, dtype=torch.float32).to(DTYPES[dtype]).to(device)
    ready, quantizer = torch.empty_like(x), PerGroup(bits)
    compressed = quantizer.compress(x)
    compressed.decompress()
    timed = _on_gpu if device == "cuda" else _on_cpu

    def pair() -> object:
        return quantizer.compress(x).decompress()

    def ready_pair() -> None:
        kept = quantizer.compress(x)
        kernels = cuda if device == "cuda" else cpu
        kernels.dequantize(kept.packed, kept.minimum, kept.range, bits, quantizer.group_size, ready)

    contestants: dict[str, Callable[[], object]] = {
        "compress": lambda: quantizer.compress(x),
        "decompress": compressed.decompress,
        "pair": pair,
        "ready": ready_pair,
        "copy": lambda: ready.copy_(x),
        "clone": lambda: x.clone(),
    }
    found = _rounds(contestants, rounds, timed)
    found |= _rounds({"reference": lambda: _reference(quantizer, x)}, _REFERENCE_ROUNDS, timed)
    best = {name: min(times) for name, times in found.items()}
    bytes_of = x.numel() * x.element_size()
    moved = (bytes_of + compressed.nbytes) / (2 * bytes_of)  # of what a copy moves
    return QuantizerTiming(
        *(dtype, x.numel(), bits, device, best["compress"], best["decompress"], best["pair"]),
        best["ready"],
        *(best["copy"], best["clone"], best["reference"]),
        medians={name: statistics.median(times) for name, times in found.items()},
        share=2 * best["copy"] / best["pair"],
        ready_share=2 * best["copy"] / best["ready"],
        compress_share=moved * best["copy"] / best["compress"],
        decompress_share=moved * best["copy"] / best["decompress"],
        times_reference=best["reference"] / best["pair"],
    )


def _reference(quantizer: PerGroup, x: torch.Tensor) -> torch.Tensor:
    kept = reference.quantize(x, quantizer.bits, quantizer.group_size, 1)
    out = torch.empty_like(x)
    reference.dequantize(*kept, quantizer.bits, quantizer.group_size, out)
    return out


def _rounds(
    contestants: dict[str, Callable[[], object]], rounds: int, timed: Callable[[Callable[[], object]], float]
) -> dict[str, Sequence[float]]:
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            found[name].append(timed(run))
    return dict(found)


def _on_cpu(run: Callable[[], object]) -> float:
    before = time.perf_counter()
    result = run()
    after = time.perf_counter()
    del result  # giving memory back is not timed
    return (after - before) * 1e3


def _on_gpu(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
