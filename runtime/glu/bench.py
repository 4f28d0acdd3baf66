"""What one gated MLP keeps and takes in a training step, by fewbit and by what else there is, measured in one run.

    for row in measure(Case(tokens=2048)): row.units, row.ms, row.ratio

Each round times every method, one after the other, so that a machine whose speed drifts slows all alike; medians over
rounds are told, and of the ratio to eager in the same round. Kept are the storages that autograd saves, each once and
without parameters; `units` leaves x out, and counts in tensors of tokens × intermediate.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..activations.gated import plan_of
from ..layers.gated_mlp import GatedMLP
from ..tensors.glu_parts import GROUP_SIZE, Keep
from ..tensors.packing import packed_size

Run = Callable[[Tensor], Tensor]

# Kept besides x, in tokens × intermediate: of packages that need not be installed, and how that is known.
BY_FORMULA = {
    "Liger-Kernel (formula)": 3.0,  # gate and up for its kernel, h for the down projection
    "Unsloth, NeMo (formula)": 2.0,  # gate and up; h is computed again
}
# What units shall not exceed, and a step's time by eager's: on a CPU, on a GPU of tokens × intermediate ≥ 2^26.
UNITS_BARS = {"parts": 0.75, "inputs": 0.55}
TIME_BARS = {"cpu": 1.15, "cuda": 1.0}
LEAST_ON_GPU = 2**26


@dataclass(frozen=True)
class Case:
    """What is measured: Llama's block, on a device and in a dtype.

    Attributes:
        tokens, hidden, intermediate: sizes.
    """

    tokens: int = 1024
    hidden: int = 1024
    intermediate: int = 2816
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def unit(self) -> int:
        """Bytes of a tensor of tokens × intermediate."""
        return self.tokens * self.intermediate * self.dtype.itemsize


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        method: its name.
        kept: bytes kept for backward, x and all.
        bytes_per_token: the same for each token.
        units: kept besides x, in tensors of tokens × intermediate.
        ms: of forward and backward together, the median; None where it was not run.
        ratio: median over rounds of its time divided by eager's.
        bars: of units and ratio, where there are.
    """

    method: str
    kept: float
    bytes_per_token: float
    units: float
    ms: float | None
    ratio: float | None
    bars: tuple[float | None, float | None]

    @property
    def met(self) -> bool | None:
        """Whether units and ratio are within their bars; None where there is none."""
        held = [
            value <= bar
            for value, bar in zip((self.units, self.ratio), self.bars, strict=True)
            if bar and value is not None
        ]
        return all(held) if held else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `met` as JSON values."""
        return {**asdict(self), "met": self.met}


def measure(case: Case, rounds: int = 7, compiled: bool = False) -> list[Row]:
    """Return a row for each method, eager first; `rounds` of 0 leave the times out.

    Args:
        case: what is measured.
        rounds: how often each is timed, after one that is not counted.
        compiled: with torch.compile too, which needs a compiler and some time.
    """
    mlp = GatedMLP(case.hidden, case.intermediate, device=case.device, dtype=case.dtype)
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(case.tokens, case.hidden, generator=draw) for _ in range(2))
    x = x.to(case.device, case.dtype).requires_grad_()
    grad = grad.to(case.device, case.dtype)
    runs = dict(_methods(mlp, compiled))
    kept = {name: kept_bytes(run, x, set(_memory(mlp.parameters()))) for name, run in runs.items()}
    times = _times(runs, x, grad, [x, *mlp.parameters()], rounds)
    rows = [_row(case, name, kept[name], times[name], times["eager"]) for name in runs]
    formula = [_row(case, name, x.nbytes + units * case.unit, [], []) for name, units in BY_FORMULA.items()]
    return [*rows, *formula]


def kept_bytes(run: Run, x: Tensor, parameters: set[int]) -> int:
    """Return the bytes of the storages that autograd saves in `run(x)`, but for those in `parameters`."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    del y
    return sum(size for memory, size in saved.items() if memory not in parameters)


def _memory(tensors: Any) -> Iterator[int]:
    return (t.untyped_storage().data_ptr() for t in tensors)


def _methods(mlp: GatedMLP, compiled: bool) -> Iterator[tuple[str, Run]]:
    def eager(x: Tensor) -> Tensor:
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    yield "eager", eager
    yield "checkpointed", lambda x: checkpoint(eager, x, use_reentrant=True)  # pyright: ignore[reportReturnType]
    if compiled:
        yield "torch.compile", torch.compile(eager)
    keeps: tuple[Keep, ...] = ("parts", "inputs", "exact")
    for keep in keeps:
        yield f"fewbit, {keep}", partial(_fewbit, mlp, keep, None)
    yield "fewbit, parts, x in 4 bits", partial(_fewbit, mlp, "parts", 4)


def _fewbit(mlp: GatedMLP, keep: Keep, input_bits: int | None, x: Tensor) -> Tensor:
    mlp.set_plan(plan_of("silu", (), keep=keep), input_bits)
    return mlp(x)


def _times(runs: dict[str, Run], x: Tensor, grad: Tensor, inputs: list[Tensor], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1 if rounds else 0):
        names = list(runs)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for tensor in inputs:
                tensor.grad = None
            _wait(x)
            start = time.perf_counter()
            runs[name](x).backward(grad)
            _wait(x)
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _row(case: Case, name: str, kept: float, seconds: list[float], eager: list[float]) -> Row:
    ratio = statistics.median(a / b for a, b in zip(seconds, eager, strict=True)) if seconds else None
    keep = name.removeprefix("fewbit, ")
    of_time = TIME_BARS.get(torch.device(case.device).type) if name.startswith("fewbit") else None
    if case.device != "cpu" and case.tokens * case.intermediate < LEAST_ON_GPU:
        of_time = None
    in_halves = case.dtype.itemsize == 2  # the bars of units are told of bfloat16
    return Row(
        name,
        kept,
        kept / case.tokens,
        (kept - _of_x(case, 4 if "x in 4 bits" in name else None)) / case.unit,
        statistics.median(seconds) * 1e3 if seconds else None,
        ratio,
        (UNITS_BARS.get(keep) if in_halves else None, of_time),
    )


def _of_x(case: Case, bits: int | None) -> int:
    n = case.tokens * case.hidden
    return n * case.dtype.itemsize if bits is None else packed_size(n, bits) + 4 * -(-n // GROUP_SIZE)
