"""Speed of the few-bit activations beside torch's own modules, measured in one run.

Each round times both, one after the other, so that a machine whose speed drifts slows both alike; medians over rounds
are reported. GB/s count the bytes that must move: x, y and the code forward; gradient, code (or x) and result backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..tables import FewbitError, Table
from .activations import modules

# Those that torch.nn has too, by arguments that all have defaults.
ACTIVATIONS = [name for name in modules.MODULES if hasattr(nn, name) and name != "Threshold"]
PASSES = ("forward", "backward", "both")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
# What a call costs shows on a tensor that takes no time; the yardstick is 1,000 elements.
SMALL = (1000,)
# Rounds of a millisecond: one that another process interrupts is told from the others by the median.
_CALLS_PER_ROUND = 20
_ROUNDS_OF_CALLS = 10

# What forward and backward together shall not exceed: times torch's, and microseconds more than torch's on `SMALL`.
BARS = {"GELU": 0.75, "SiLU": 1.15, "Tanh": 1.5, "Sigmoid": 1.5}
BAR_SHAPE = (4096, 4096)
BAR_DTYPES = ("float32", "bfloat16")
BAR_BITS = (1, 2, 3, 4)
OVERHEAD_BAR_US = 30.0


@dataclass(frozen=True)
class Timing:
    """Median times of one pass over one tensor.

    Attributes:
        activation: class name in torch.nn.
        dtype: of the tensor.
        shape: of the tensor.
        bits: kept per element by fewbit.
        which: forward, backward, or both.
        fewbit_ms, torch_ms: milliseconds, medians over rounds.
        ratio: median over rounds of fewbit's time divided by torch's.
        fewbit_gbs, torch_gbs: bytes that must move / time, 1e9 bytes a second.
    """

    activation: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    which: str
    fewbit_ms: float
    torch_ms: float
    ratio: float
    fewbit_gbs: float
    torch_gbs: float

    @property
    def bar(self) -> float | None:
        """What `ratio` shall not exceed, if there is such a bar."""
        told = self.which == "both" and self.shape == BAR_SHAPE and self.dtype in BAR_DTYPES and self.bits in BAR_BITS
        return BARS.get(self.activation) if told else None

    @property
    def met(self) -> bool | None:
        """Whether `ratio` is within the bar; None where there is none."""
        return None if self.bar is None else self.ratio <= self.bar

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": self.bar, "met": self.met}


@dataclass(frozen=True)
class Overhead:
    """What forward and backward cost in microseconds on 1,000 elements, where the calls are all there is."""

    activation: str
    dtype: str
    bits: int
    fewbit_us: float
    torch_us: float

    @property
    def difference_us(self) -> float:
        """Microseconds that fewbit costs more than torch."""
        return self.fewbit_us - self.torch_us

    @property
    def met(self) -> bool:
        """Whether that is within `OVERHEAD_BAR_US`."""
        return self.difference_us <= OVERHEAD_BAR_US

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar_us": OVERHEAD_BAR_US, "met": self.met}


def bench_activation(
    activation: str,
    dtype: str,
    shape: tuple[int, ...],
    bits: int = 3,
    table: Table | None = None,
    rounds: int = 15,
    passes: Sequence[str] = PASSES,
) -> Iterator[Timing]:
    """Yield the timings of forward, backward and both.

    Args:
        activation: class name in torch.nn, such as ``GELU``.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        shape: of the tensor, row-major, standard normal values.
        bits: kept per element; or give a `table`.
        rounds: how often each is timed, after two rounds that are not counted.
        passes: which of them.

    Raises:
        FewbitError: an argument is wrong.
    """
    ours, theirs = _pair(activation, bits, table)
    x, grad = _tensors(shape, dtype)
    n, size = x.numel(), x.element_size()
    code = (n + 7) // 8 * ours.bits
    ours_moves = {"forward": 2 * n * size + code, "backward": 2 * n * size + code}
    torch_moves = {"forward": 2 * n * size, "backward": 3 * n * size}
    for moves in (ours_moves, torch_moves):
        moves["both"] = moves["forward"] + moves["backward"]
    for which in passes:
        a, b = (_runner(module, which, x, grad) for module in (ours, theirs))
        times = _alternate(a, b, rounds)
        fewbit_s, torch_s = (statistics.median(t) for t in times)
        yield Timing(
            activation,
            dtype,
            shape,
            ours.bits,
            which,
            fewbit_s * 1e3,
            torch_s * 1e3,
            statistics.median(f / t for f, t in zip(*times, strict=True)),
            ours_moves[which] / fewbit_s / 1e9,
            torch_moves[which] / torch_s / 1e9,
        )


def bench_overhead(activation: str, dtype: str, bits: int = 3, rounds: int = 25) -> Overhead:
    """Return what a call costs: forward and backward on `SMALL`, medians over ten times `rounds` of many calls."""
    ours, theirs = _pair(activation, bits, None)
    x, grad = _tensors(SMALL, dtype)

    def many(module: nn.Module) -> Callable[[], None]:
        once = _runner(module, "both", x, grad)

        def run() -> None:
            for _ in range(_CALLS_PER_ROUND):
                once()

        return run

    times = _alternate(many(ours), many(theirs), rounds * _ROUNDS_OF_CALLS)
    fewbit_us, torch_us = (statistics.median(t) / _CALLS_PER_ROUND * 1e6 for t in times)
    return Overhead(activation, dtype, ours.bits, fewbit_us, torch_us)


def _pair(activation: str, bits: int, table: Table | None) -> tuple[modules.FewBitActivation, nn.Module]:
    if activation not in ACTIVATIONS:
        raise FewbitError(f"no module {activation!r} to measure; there are {', '.join(ACTIVATIONS)}")
    ours = getattr(modules, activation)(bits=None if table is not None else bits, table=table)
    return ours, getattr(nn, activation)()


def _tensors(shape: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    if dtype not in DTYPES:
        raise FewbitError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    return x.requires_grad_(), grad


def _runner(module: nn.Module, which: str, x: Tensor, grad: Tensor) -> Callable[[], object]:
    if which == "forward":
        return lambda: module(x)
    if which == "both":
        return lambda: torch.autograd.grad(module(x), x, grad)
    y = module(x)
    return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


def _alternate(a: Callable[[], object], b: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Time `a` and `b` in turn; the first two rounds warm caches and kernels up and are not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):
        for run, record in zip((a, b), times, strict=True):
            start = time.perf_counter()
            result = run()
            record.append(time.perf_counter() - start)
            del result
    return times[0][2:], times[1][2:]
