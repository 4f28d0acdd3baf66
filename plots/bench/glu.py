"""`fewbit bench glu`: memory and time of one gated MLP's training step, with fewbit and with alternatives.

    for row in measure(Case(tokens=2048)): row.units, row.ms, row.ratio

Times are medians over rounds; `ratio` is the median over rounds of the time divided by eager's in the same round. Kept
bytes count each storage that autograd saves once, without parameters; `units` excludes x, in tensors of tokens ×
intermediate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...runtime.activations.gated import plan_of
from ...runtime.layers.gated_mlp import GatedMLP
from ...runtime.quantizers.kinds import QuantizerKind
from ...runtime.tensors.glu_parts import GROUP_SIZE, Keep
from ...runtime.tensors.packing import packed_size
from ...tables.columns import columns
from .kept import kept_bytes
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import Times, clock_of, take_turns

Method = Callable[[Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Units of packages that need not be installed, from what their kernels keep besides x.
BY_FORMULA = {
    "Liger-Kernel (formula)": 3.0,  # gate and up for its kernel, h for the down projection
    "Unsloth, NeMo (formula)": 2.0,  # gate and up; h is recomputed
}
# Upper limits of units and of a step's time relative to eager: on a CPU, on a GPU with tokens × intermediate ≥ 2^26.
UNITS_BARS = {"parts": 0.75, "inputs": 0.55}
TIME_BARS = {"cpu": 1.15, "cuda": 1.0}
LEAST_ON_GPU = 2**26


@dataclass(frozen=True)
class Case:
    """A problem: Llama's block of given sizes, on a device and in a dtype.

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
        """Bytes of one tensor of tokens × intermediate."""
        return self.tokens * self.intermediate * self.dtype.itemsize


@dataclass(frozen=True)
class Row:
    """Result for one method.

    Attributes:
        method: its name.
        kept: bytes kept for backward, including x.
        bytes_per_token: `kept` divided by the number of tokens.
        units: kept besides x, in tensors of tokens × intermediate.
        ms: median time of forward and backward together; None if not run.
        ratio: median over rounds of its time divided by eager's.
        bars: upper limits of units and ratio, if any.
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
        """Whether units and ratio are within their bars; None if there are no bars."""
        held = [
            value <= bar
            for value, bar in zip((self.units, self.ratio), self.bars, strict=True)
            if bar and value is not None
        ]
        return all(held) if held else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `met` as JSON values."""
        return {**asdict(self), "met": self.met}


_SIZE = click.IntRange(1, 2**24)


@bench_command("glu", threads=True, device=True)
@click.option("--tokens", type=_SIZE, metavar="N", default=1024, show_default=True, help="Tokens in a batch.")
@click.option("--hidden", type=_SIZE, metavar="N", default=1024, show_default=True, help="Features of a token.")
@click.option(
    "--intermediate", type=_SIZE, metavar="N", default=2816, show_default=True, help="Features between the projections."
)
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="float32", show_default=True)
@rounds_option(7)
@click.option("--compiled", is_flag=True, help="Also measure torch.compile.")
def command(
    tokens: int, hidden: int, intermediate: int, dtype: str, device: str, rounds: int, compiled: bool
) -> Report:
    """Measure a training step of a gated MLP: memory, and time beside eager torch.

    The MLP is Llama's; eager torch is timed in the same rounds. Liger-Kernel, Unsloth and NeMo are listed with the
    bytes that their kernels save. The bars for a GPU hold from tokens x intermediate = 2^26 on.

    Example: fewbit bench glu --device cuda --dtype bfloat16 --tokens 8192 --hidden 4096 --intermediate 14336
    """
    case = Case(tokens, hidden, intermediate, DTYPES[dtype], device)
    rows = measure(case, rounds, compiled)
    return Report(report_of(case, rows), lines_of(case, rows))


def report_of(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the measurement for JSON."""
    here = this_machine(case.device)
    return {
        "torch": here.torch,
        "threads": here.threads,
        "device": here.device,
        "dtype": str(case.dtype).removeprefix("torch."),
        **{name: getattr(case, name) for name in ("tokens", "hidden", "intermediate")},
        "rows": [row.to_dict() for row in rows],
    }


def lines_of(case: Case, rows: Sequence[Row]) -> list[str]:
    """Return a table of the methods, followed by a legend of its columns."""
    head = ("method", "kept per token", "units", "bar", "ms", "ratio", "bar", "met")
    body = [
        (
            row.method,
            f"{row.bytes_per_token:,.0f} B",
            f"{row.units:.3f}",
            *("" if value is None else f"{value:.{digits}f}" for value, digits in _numbers(row)),
            MET[row.met],
        )
        for row in rows
    ]
    dtype = str(case.dtype).removeprefix("torch.")
    return [
        f"{case.tokens} tokens, hidden {case.hidden}, intermediate {case.intermediate}, {dtype}, {case.device}",
        *columns([head, *body], left=1),
        "",
        "Kept with x; units without it, in tensors of tokens x intermediate. Ratio: to eager, median over rounds.",
    ]


def _numbers(row: Row) -> tuple[tuple[float | None, int], ...]:
    return (row.bars[0], 2), (row.ms, 1), (row.ratio, 3), (row.bars[1], 2)


def measure(case: Case, rounds: int = 7, compiled: bool = False) -> list[Row]:
    """Return a row for each method, eager first; with `rounds` 0 nothing is timed.

    Args:
        case: the problem.
        rounds: timings of each method, after one warm-up.
        compiled: whether to time torch.compile too, which needs a compiler and some time.
    """
    mlp = GatedMLP(case.hidden, case.intermediate, device=case.device, dtype=case.dtype)
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(case.tokens, case.hidden, generator=draw) for _ in range(2))
    x = x.to(case.device, case.dtype).requires_grad_()
    grad = grad.to(case.device, case.dtype)
    methods = dict(_methods(mlp, compiled))
    parameters = {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    kept = {name: kept_bytes(method, x, parameters) for name, method in methods.items()}
    times = _times(methods, x, grad, [x, *mlp.parameters()], rounds) if rounds else None
    rows = [_row(case, name, kept[name], times) for name in methods]
    return [*rows, *(_row(case, name, x.nbytes + units * case.unit, None) for name, units in BY_FORMULA.items())]


def _methods(mlp: GatedMLP, compiled: bool) -> Iterator[tuple[str, Method]]:
    def eager(x: Tensor) -> Tensor:
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    yield "eager", eager
    yield "checkpointed", lambda x: checkpoint(eager, x, use_reentrant=True)  # pyright: ignore[reportReturnType]
    if compiled:
        yield "torch.compile", torch.compile(eager)
    keeps: tuple[Keep, ...] = ("parts", "inputs", "exact")
    for keep in keeps:
        yield f"fewbit, {keep}", partial(_fewbit, mlp, keep, None, "groups")
    yield "fewbit, parts, rotated", partial(_fewbit, mlp, "parts", None, "rotated")
    yield "fewbit, parts, x in 4 bits", partial(_fewbit, mlp, "parts", 4, "groups")


def _fewbit(mlp: GatedMLP, keep: Keep, input_bits: int | None, quantizer: QuantizerKind, x: Tensor) -> Tensor:
    mlp.set_plan(plan_of("silu", (), keep=keep, quantizer=quantizer), input_bits)
    return mlp(x)


def _times(methods: dict[str, Method], x: Tensor, grad: Tensor, inputs: list[Tensor], rounds: int) -> Times[str]:
    runs = {name: partial(_step, method, x, grad) for name, method in methods.items()}

    def forget(_: str) -> None:
        for tensor in inputs:
            tensor.grad = None

    return take_turns(runs, rounds, clock=clock_of(x.device.type), warm_up=1, after=forget, rotate=True)


def _step(method: Method, x: Tensor, grad: Tensor) -> None:
    method(x).backward(grad)


def _row(case: Case, name: str, kept: float, times: Times[str] | None) -> Row:
    keep = name.removeprefix("fewbit, ")
    of_time = TIME_BARS.get(torch.device(case.device).type) if name.startswith("fewbit") else None
    if case.device != "cpu" and case.tokens * case.intermediate < LEAST_ON_GPU:
        of_time = None
    in_halves = case.dtype.itemsize == 2  # the bars of units are defined for bfloat16
    return Row(
        name,
        kept,
        kept / case.tokens,
        (kept - _of_x(case, 4 if "x in 4 bits" in name else None)) / case.unit,
        times and times.median(name) * 1e3,
        times and times.ratio(name, to="eager"),
        (UNITS_BARS.get(keep) if in_halves else None, of_time),
    )


def _of_x(case: Case, bits: int | None) -> int:
    n = case.tokens * case.hidden
    return n * case.dtype.itemsize if bits is None else packed_size(n, bits) + 4 * -(-n // GROUP_SIZE)
