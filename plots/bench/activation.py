"""`fewbit bench activation`: speed of the few-bit activations beside torch's own modules in the same run.

Reports medians over rounds. GB/s count the bytes that must move: x, y and the code in the forward pass; gradient, code
(or x) and result in the backward pass. GPU version: activation_cuda.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn

from ...cli.options import bits_option
from ...cli.progress import with_progress
from ...runtime.activations import modules
from ...tables import FewbitError, Table
from ...tables.columns import columns
from ...tables.names import find_name, nearest_hint
from .activation_cuda import cuda_report
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import repeated, take_turns

# Activations that torch.nn has too and whose arguments all have defaults.
ACTIVATIONS = [name for name in modules.MODULES if hasattr(nn, name) and name != "Threshold"]
PASSES = ("forward", "backward", "both")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
# Call overhead shows on a tensor that takes no time; the target is set for 1,000 elements.
SMALL = (1000,)
# Rounds of a millisecond: the median rejects those that another process interrupts.
_CALLS_PER_ROUND = 20
_ROUNDS_OF_CALLS = 10

# Upper limits for forward and backward together: ratio to torch, and extra microseconds on `SMALL`.
BARS = {"GELU": 0.75, "SiLU": 1.15, "Tanh": 1.5, "Sigmoid": 1.5}
BAR_SHAPE = (4096, 4096)
BAR_DTYPES = ("float32", "bfloat16")
BAR_BITS = (1, 2, 3, 4)
OVERHEAD_BAR_US = 30.0


@dataclass(frozen=True)
class Timing:
    """Median times of one pass over one tensor.

    Attributes:
        activation: name of the class in torch.nn.
        dtype: of the tensor.
        shape: of the tensor.
        bits: bits kept per element by fewbit.
        which: forward, backward, or both.
        fewbit_ms, torch_ms: milliseconds, medians over rounds.
        ratio: median over rounds of fewbit's time divided by torch's.
        fewbit_gbs, torch_gbs: bytes that must move / time, in 1e9 bytes per second.
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
        """Upper limit of `ratio`, or None if there is none."""
        has_bar = (
            self.which == "both" and self.shape == BAR_SHAPE and self.dtype in BAR_DTYPES and self.bits in BAR_BITS
        )
        return BARS.get(self.activation) if has_bar else None

    @property
    def met(self) -> bool | None:
        """Whether `ratio` is within the bar; None if there is no bar."""
        return None if self.bar is None else self.ratio <= self.bar

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": self.bar, "met": self.met}


@dataclass(frozen=True)
class Overhead:
    """Microseconds of forward and backward on 1,000 elements, where call overhead dominates."""

    activation: str
    dtype: str
    bits: int
    fewbit_us: float
    torch_us: float

    @property
    def difference_us(self) -> float:
        """Microseconds by which fewbit is slower than torch."""
        return self.fewbit_us - self.torch_us

    @property
    def met(self) -> bool:
        """Whether the difference is within `OVERHEAD_BAR_US`."""
        return self.difference_us <= OVERHEAD_BAR_US

    def to_dict(self) -> dict[str, object]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar_us": OVERHEAD_BAR_US, "met": self.met}


class Shape(click.ParamType):
    """The shape of a tensor such as ``4096x4096``: a tuple of positive whole numbers."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the tuple; on failure, report the accepted form in one line."""
        if isinstance(value, tuple):
            return value
        sizes = value.lower().replace(",", "x").split("x")
        if not all(size.strip().isdecimal() and 0 < int(size) < 2**40 for size in sizes):
            self.fail(f"{value!r} is not a shape such as 4096x4096", param, ctx)
        return tuple(int(size) for size in sizes)


@bench_command("activation", threads=True, device=True)
@click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)
@bits_option
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or float64.")
@click.option("--shape", type=Shape(), default="4096x4096", show_default=True, help="Shape of the tensor.")
@rounds_option()
@click.option("--bars", is_flag=True, help="Measure all that has a bar: four activations, two dtypes, 1 to 4 bits.")
@click.pass_context
def command(
    ctx: click.Context,
    activations: tuple[str, ...],
    bits: int,
    dtype: str,
    shape: tuple[int, ...],
    rounds: int,
    bars: bool,
    device: str,
) -> Report:
    """Time activations, forward and backward, beside torch's own modules.

    Times forward, backward and both in turn, of gelu if none is named, and prints medians: milliseconds, the ratio to
    torch, and GB/s of the bytes that must move. The last row is the cost of a call on a tensor of 1,000 elements. Where
    there is a bar, the table says whether it is met; --bars measures all that have one, forward and backward together.

    On a GPU, times GELU in three dtypes, at 2^20 to 2^29 elements and 1 to 8 bits, beside torch, torch.compile and a
    copy; --dtype, --shape and --bits choose among them.

    Example: fewbit bench activation gelu silu --dtype bfloat16 --bits 4
    """
    if device == "cuda":
        typed = click.core.ParameterSource.COMMANDLINE
        given = {name for name in ctx.params if ctx.get_parameter_source(name) == typed}
        if given & {"activations", "threads", "bars"}:
            raise click.UsageError("--device cuda measures GELU: only --dtype, --shape, --bits and --rounds choose")
        return cuda_report(**{name: ctx.params[name] for name in given & {"dtype", "shape", "bits", "rounds"}})
    if bars and activations:
        raise click.UsageError("--bars measures activations of its own: name none")
    cases = [(_module_name(name), dtype, [bits]) for name in activations or ("gelu",)]
    if bars:
        cases = [(name, barred, list(BAR_BITS)) for barred in BAR_DTYPES for name in BARS]
    timings: list[Timing] = []
    overheads: list[Overhead] = []
    for name, of_dtype, of_bits in with_progress(cases, len(cases), "measuring"):
        for count in of_bits:
            passes = ("both",) if bars else PASSES
            timings += bench_activation(name, of_dtype, shape, count, rounds=rounds, passes=passes)
        overheads.append(bench_overhead(name, of_dtype, of_bits[-1], rounds=rounds))
    here = this_machine()
    values = {
        "torch": here.torch,
        "threads": here.threads,
        "timings": [timing.to_dict() for timing in timings],
        "overheads": [overhead.to_dict() for overhead in overheads],
    }
    heading = f"torch {here.torch}, {here.where}, {'x'.join(map(str, shape))}"
    small = "forward and backward of 1,000 elements, microseconds a call"
    return Report(values, [heading, *_timing_lines(timings), "", small, *_overhead_lines(overheads)])


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
        activation: name of the class in torch.nn, such as ``GELU``.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        shape: of the tensor, row-major, standard normal values.
        bits: bits kept per element; alternatively give a `table`.
        rounds: timings of each pass, after two warm-up rounds.
        passes: the passes to time.

    Raises:
        FewbitError: an argument is invalid.
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
        runs = {"fewbit": _runner(ours, which, x, grad), "torch": _runner(theirs, which, x, grad)}
        times = take_turns(runs, rounds)
        fewbit_s, torch_s = times.median("fewbit"), times.median("torch")
        yield Timing(
            activation,
            dtype,
            shape,
            ours.bits,
            which,
            fewbit_s * 1e3,
            torch_s * 1e3,
            times.ratio("fewbit", to="torch"),
            ours_moves[which] / fewbit_s / 1e9,
            torch_moves[which] / torch_s / 1e9,
        )


def bench_overhead(activation: str, dtype: str, bits: int = 3, rounds: int = 25) -> Overhead:
    """Return the cost of a call: forward and backward on `SMALL`, medians over 10 × `rounds` rounds of many calls."""
    ours, theirs = _pair(activation, bits, None)
    x, grad = _tensors(SMALL, dtype)
    runs = {
        who: repeated(_runner(module, "both", x, grad), _CALLS_PER_ROUND)
        for who, module in (("fewbit", ours), ("torch", theirs))
    }
    times = take_turns(runs, rounds * _ROUNDS_OF_CALLS)
    fewbit_us, torch_us = (times.median(who) / _CALLS_PER_ROUND * 1e6 for who in ("fewbit", "torch"))
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


def _module_name(name: str) -> str:
    found = find_name(name, ACTIVATIONS)
    if found is None:
        hint = nearest_hint(name, ACTIVATIONS, f"; there are {', '.join(ACTIVATIONS)}")
        raise FewbitError(f"no module {name!r} to measure{hint}")
    return found


def _timing_lines(timings: Sequence[Timing]) -> list[str]:
    head = ("activation", "dtype", "bits", "pass", "fewbit ms", "torch ms", "ratio", "bar", "met", "GB/s", "torch GB/s")
    body = [
        (
            *(t.activation, t.dtype, str(t.bits), t.which),
            *(f"{v:.2f}" for v in (t.fewbit_ms, t.torch_ms, t.ratio)),
            *("" if t.bar is None else f"{t.bar:.2f}", MET[t.met]),
            *(f"{v:.1f}" for v in (t.fewbit_gbs, t.torch_gbs)),
        )
        for t in timings
    ]
    return list(columns([head, *body], left=4))


def _overhead_lines(overheads: Sequence[Overhead]) -> list[str]:
    head = ("activation", "dtype", "bits", "fewbit us", "torch us", "difference us", "bar", "met")
    body = [
        (
            *(o.activation, o.dtype, str(o.bits)),
            *(f"{v:.1f}" for v in (o.fewbit_us, o.torch_us, o.difference_us, OVERHEAD_BAR_US)),
            MET[o.met],
        )
        for o in overheads
    ]
    return list(columns([head, *body], left=3))
