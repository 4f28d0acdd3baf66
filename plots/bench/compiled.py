"""`fewbit bench compiled`: training steps of small transformers under `torch.compile`, with few bits and without.

    for row in measure(Case("Llama", "bfloat16"), ["eager", "compile", "fewbit-4"]): row.variant, row.kept, row.ratio

Each variant is a copy of one model in this process, and all take turns step by step. Errors of gradients are relative
to eager torch in the same dtype; bytes and times stand beside `torch.compile` alone. The peak of resident memory is
that of a step in a process of its own, as allocators keep what other variants freed; and a first step that finds all
compiled in a cache is that of a second process.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor, nn

from ...cli.progress import with_progress
from ...runtime.compile.options import CompileOptions
from ...runtime.memory.allocator import return_freed_memory
from ...tables.columns import columns
from .compiled_trainings import (
    BUDGETS,
    CHECKPOINT,
    COMPILE,
    DTYPES,
    EAGER,
    FEWBIT,
    FLOAT8,
    LONGEST,
    MODELS,
    VARIANTS,
    Case,
    Training,
    compiles,
    model_of,
    tokens_of,
)
from .processes import ProcessDied, added_peak_bytes, call_apart
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import Clock, computing, processor, take_turns, timed

PEAK_BATCH, PEAK_TOKENS = 24, LONGEST

# Upper limits, in float32 and under bfloat16 autocast: of bytes and of time relative to `torch.compile` alone, of the
# gradient's error, of compile time relative to `torch.compile` alone, with an empty cache and from the cache.
KEPT_BARS = {"auto": (0.20, 0.26), "8": (0.27, 0.33), "4": (0.14, 0.17), "3": (0.11, 0.14), "2": (0.075, 0.10)}
TIME_BARS = (1.05, 1.08)
WALL_BARS = {"8": 1.06, "4": 1.10}
ERROR_BARS = {"fewbit-auto": 0.06, "fewbit-8": 0.01, "fewbit-4-nearest": 0.10}
COMPILE_BAR, CACHED_BAR = 1.5, 1.2


@dataclass(frozen=True)
class Peak:
    """One step, its memory and its time each in a process of its own.

    Attributes:
        bytes: rise of resident memory, without parameters and their gradients; None where the system cannot tell.
        kept: bytes kept between forward and backward on this batch.
        predicted: the larger of the peaks that Inductor's analysis of liveness states for the compiled graphs, forward
            and backward; None for what is not compiled.
        seconds: wall time of the step, the best of the rounds; None if not measured.
    """

    bytes: int | None
    kept: int
    predicted: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Row:
    """Result for one variant.

    Attributes:
        model, dtype: of the case.
        variant: a name of `VARIANTS`.
        kept: bytes kept between forward and backward, without parameters and inputs.
        kept_ratio: divided by those of `torch.compile` alone; None if that is not measured.
        ms: median time of a step.
        ratio: median over rounds of its time divided by that of `torch.compile` alone in the same round.
        error: of the gradients of all parameters, relative to eager torch's.
        loss: of the first step.
        same_loss: whether the loss is that of `torch.compile` alone to the bit.
        compile_seconds: the first step with nothing in Inductor's cache; None if nothing is compiled.
        compile_ratio: relative to `torch.compile` alone.
        cached_seconds: the first step of a process after one with the same cache; None if not measured.
        cached_ratio: relative to `torch.compile` alone.
        peak: memory and time of a step on a larger batch; None if not measured.
        wall: whether times are wall time, and not the processor's.
    """

    model: str
    dtype: str
    variant: str
    kept: int
    error: float
    loss: float
    compile_seconds: float | None
    ms: float = 0.0
    kept_ratio: float | None = None
    ratio: float | None = None
    same_loss: bool | None = None
    compile_ratio: float | None = None
    cached_seconds: float | None = None
    cached_ratio: float | None = None
    peak: Peak | None = None
    wall: bool = False

    @property
    def bars(self) -> dict[str, float]:
        """Upper limits of `kept_ratio`, `ratio`, `error`, `compile_ratio`, `cached_ratio`, those that there are."""
        if self.variant not in FEWBIT or self.model == FLOAT8:
            return {}
        bits, column = self.variant.split("-")[1], DTYPES.index(self.dtype)
        found = {
            "kept_ratio": KEPT_BARS[bits][column],
            "ratio": WALL_BARS.get(bits) if self.wall else TIME_BARS[column],
            "error": ERROR_BARS.get(self.variant),
            "compile_ratio": COMPILE_BAR,
            "cached_ratio": CACHED_BAR,
        }
        return {name: bar for name, bar in found.items() if bar is not None}

    @property
    def met(self) -> bool | None:
        """Whether all bars are met and the loss is that of `torch.compile`; None if there is nothing to compare."""
        pairs = [(getattr(self, name), bar) for name, bar in self.bars.items()]
        held = [value <= bar for value, bar in pairs if value is not None]
        if self.variant in FEWBIT and self.same_loss is not None:
            held.append(self.same_loss)
        return all(held) if held else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, `bars` and `met` as JSON values."""
        return {**asdict(self), "bars": self.bars, "met": self.met}


_SIZE = click.IntRange(1, 2**16)


def _names(name: str, choices: Sequence[str], help: str) -> Callable[..., Any]:
    return click.option(name, f"{name[2:]}s", type=click.Choice(choices), multiple=True, help=f"{help}  [default: all]")


@bench_command("compiled")
@click.option(
    "--model",
    "models",
    type=click.Choice([*MODELS, FLOAT8]),
    multiple=True,
    default=MODELS,
    show_default=True,
    help=f"A model; may be repeated. {FLOAT8} needs torchao.",
)
@_names("--dtype", DTYPES, "bfloat16 is autocast; may be repeated.")
@_names("--variant", VARIANTS, "A way to train; may be repeated.")
@click.option(
    "--options",
    type=(str, str),
    multiple=True,
    metavar="NAME JSON",
    help="""A further variant: the backend with these options, as "3 bits" '{"bits": 3}'; may be repeated.""",
)
@click.option("--layers", type=_SIZE, metavar="N", default=4, show_default=True, help="Blocks of a model.")
@click.option("--batch", type=_SIZE, metavar="N", default=4, show_default=True, help="Sequences of a batch.")
@click.option(
    "--tokens", type=click.IntRange(2, 2**16), metavar="N", default=128, show_default=True, help="Tokens of a sequence."
)
@rounds_option(15, "Timed steps of each.")
@click.option("--wall", is_flag=True, help="Measure wall time on two threads, instead of processor time on one.")
@click.option("--peak", is_flag=True, help="Also measure the peak of resident memory, each in its own process.")
@click.option("--cached", is_flag=True, help="Also measure the first step of a second process, which compiles nothing.")
def command(
    models: tuple[str, ...],
    dtypes: tuple[str, ...],
    variants: tuple[str, ...],
    options: tuple[tuple[str, str], ...],
    layers: int,
    batch: int,
    tokens: int,
    rounds: int,
    wall: bool,
    peak: bool,
    cached: bool,
) -> Iterator[Report]:
    """Train small transformers compiled, with few bits and without: memory, time and error.

    Compares torch.compile alone, eager torch, checkpointing of each block, torch.compile's own memory budgets, eager
    hooks and levels, and the backend fewbit at its defaults and at 8, 4 and 2 bits. "Kept" counts the bytes between
    forward and backward; the error is that of the gradients, relative to eager torch's. Compile time is that of the
    first step with an empty cache. Peaks are of 24 x 256 tokens, beyond the parameters and their gradients.

    Example: fewbit bench compiled --model Llama --dtype float32 --variant compile --variant fewbit-auto --peak
    """
    further = {name: _read_options(name, text) for name, text in options}
    cases = [Case(m, d, layers, batch, tokens, further) for m in models for d in dtypes or DTYPES]
    chosen = [*(v for v in VARIANTS if v in (variants or VARIANTS)), *further]
    rows: list[Row] = []
    with _threads(2 if wall else 1):
        here = this_machine()
        settings = {
            "torch": here.torch,
            "threads": here.threads,
            "clock": "wall" if wall else "processor",
            "layers": layers,
            "batch": batch,
            "tokens": tokens,
            "rounds": rounds,
            **({"peak_batch": PEAK_BATCH, "peak_tokens": PEAK_TOKENS} if peak else {}),
        }
        heading = f"torch {here.torch}, {'wall time of two threads' if wall else 'processor time of one thread'}"
        for case in cases:
            rows += measure(case, chosen, rounds, wall=wall, peak=peak, cached=cached)
            values = {**settings, "rows": [row.to_dict() for row in rows], "met": met(rows)}
            yield Report(values, [heading, *lines_of(cases, rows)])


def _read_options(name: str, text: str) -> dict[str, Any]:
    if name in VARIANTS:
        raise click.BadParameter(f"{name} is a variant already", param_hint="--options")
    try:
        options = dict(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{name}: no mapping in JSON: {error}", param_hint="--options") from None
    _ = CompileOptions.of(options)  # which checks them
    return options


def lines_of(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    """Return a table for each case, followed by a legend of the columns and the bars of peaks."""
    lines = []
    for case in cases:
        own = [row for row in rows if (row.model, row.dtype) == (case.model, case.dtype)]
        dtype = "float32" if case.dtype == "float32" else f"{case.dtype} autocast"
        sizes = f"{case.batch}x{case.tokens} tokens"
        lines += [f"{case.model}, {case.layers} layers of width 256, {sizes}, {dtype}", *_table(own), ""]
    return [
        *lines,
        "Ratios: to torch.compile alone. Error: of the gradient, beside eager torch. Met: the bars, and the loss is",
        "that of torch.compile to the bit.",
        *(f"{name}: {MET[value]}" for name, value in met(rows).items()),
    ]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    head = ("variant", "kept MB", "ratio", "bar", "ms", "ratio", "bar", "error", "bar", "compile s", "ratio", "bar")
    peaks, cached = any(row.peak for row in rows), any(row.cached_seconds for row in rows)
    head += ("cached s", "ratio", "bar") if cached else ()
    head += ("peak MiB", "predicted", "step s") if peaks else ()
    head += ("met",)
    body = []
    for row in rows:
        bars = row.bars
        error = None if row.variant == EAGER else row.error
        cells = [
            *(row.variant, f"{row.kept / 1e6:.2f}", _text(row.kept_ratio, 3), _text(bars.get("kept_ratio"), 3)),
            *(f"{row.ms:.1f}", _text(row.ratio, 3), _text(bars.get("ratio"), 2)),
            *(_text(error, 4), _text(bars.get("error"), 2)),
            *(_text(row.compile_seconds, 1), _text(row.compile_ratio, 2), _text(bars.get("compile_ratio"), 2)),
        ]
        if cached:
            bar = None if row.cached_seconds is None else row.bars.get("cached_ratio")
            cells += [_text(row.cached_seconds, 1), _text(row.cached_ratio, 2), _text(bar, 2)]
        if peaks:
            peak = row.peak or Peak(None, 0)
            sizes = (peak.bytes, peak.predicted)
            cells += [*("" if size is None else f"{size / 2**20:.0f}" for size in sizes), _text(peak.seconds, 2)]
        body.append([*cells, MET[row.met]])
    yield from columns([head, *body], left=1)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def measure(
    case: Case,
    variants: Sequence[str] = VARIANTS,
    rounds: int = 15,
    *,
    wall: bool = False,
    peak: bool = False,
    cached: bool = False,
) -> list[Row]:
    """Return a row for each variant.

    Args:
        case: the problem.
        variants: names of `VARIANTS`, or of the case's options.
        rounds: timed steps of each, after two of warm-up.
        wall: whether to measure wall time in place of the process's processor time.
        peak: whether to measure peaks of resident memory too.
        cached: whether to measure first steps from a cache too.
    """
    tokens = tokens_of(case)
    model = model_of(case)
    true = Training(EAGER, model, case).gradients(tokens)
    trainings: dict[str, Training] = {}
    rows: list[Row] = []
    with _many_compilations():
        if any(compiles(variant, case) for variant in variants):
            _warm_up_compiler()
        for variant in with_progress(variants, len(variants), f"{case.model}, {case.dtype}"):
            training = trainings[variant] = Training(variant, model, case)
            rows.append(replace(_row(case, training, tokens, true), wall=wall))
        clock: Clock = processor if wall else computing
        runs = {variant: partial(training.step, tokens) for variant, training in trainings.items()}
        times = take_turns(runs, rounds, clock=clock, after=lambda who: trainings[who].forget(), rotate=True)
    rows = [replace(row, ms=1000 * times.median(row.variant)) for row in rows]
    threads = torch.get_num_threads()
    if cached:
        found = [_cached_apart(case, v, threads) for v in with_progress(variants, len(variants), "caches")]
        rows = [replace(row, cached_seconds=seconds) for row, seconds in zip(rows, found, strict=True)]
    if COMPILE in trainings:
        alone = rows[list(trainings).index(COMPILE)]
        rows = [_beside(row, alone, times.ratio(row.variant, to=COMPILE)) for row in rows]
    if peak:
        large = replace(case, batch=PEAK_BATCH, tokens=PEAK_TOKENS)
        found = [_peak_apart(large, v, threads) for v in with_progress(variants, len(variants), "peaks")]
        rows = [replace(row, peak=one) for row, one in zip(rows, found, strict=True)]
    return rows


def met(rows: Sequence[Row]) -> dict[str, bool]:
    """Return the bars of rows beside each other, and whether each is met: less than checkpointing and budgets."""
    found: dict[str, bool] = {}
    for model, dtype in dict.fromkeys((row.model, row.dtype) for row in rows):
        of = {row.variant: row for row in rows if (row.model, row.dtype) == (model, dtype)}
        if (auto := of.get("fewbit-auto")) is None:
            continue
        for other in (of[name] for name in (CHECKPOINT, *BUDGETS) if name in of):
            name = f"{model}, {dtype}: fewbit-auto takes less than {other.variant}"
            found[f"{name}, kept"] = auto.kept < other.kept
            found[f"{name}, time"] = auto.ms < other.ms
            if auto.peak and other.peak and auto.peak.bytes is not None and other.peak.bytes is not None:
                found[f"{name}, peak"] = auto.peak.bytes < other.peak.bytes
    return found


# ---- measurements ----------------------------------------------------------------------------------------------------


def _row(case: Case, training: Training, tokens: Tensor, true: Tensor) -> Row:
    """Return a row without times and ratios; compile the model if need be."""
    seconds = None
    torch.manual_seed(0)
    if compiles(training.variant, case):
        from torch._inductor.utils import fresh_inductor_cache

        with fresh_inductor_cache():
            seconds, loss = timed(lambda: training.step(tokens))
    else:
        loss = training.step(tokens)
    error = float((training.gradients(tokens) - true).norm() / true.norm())
    kept = training.kept(tokens)
    return Row(case.model, case.dtype, training.variant, kept, error, loss, seconds)


def _beside(row: Row, alone: Row, ratio: float) -> Row:
    """Return a row with its ratios to that of `torch.compile` alone."""

    def divided(seconds: float | None, of_alone: float | None) -> float | None:
        return seconds and of_alone and seconds / of_alone

    return replace(
        row,
        kept_ratio=row.kept / alone.kept,
        ratio=ratio,
        same_loss=row.loss == alone.loss,
        compile_ratio=divided(row.compile_seconds, alone.compile_seconds),
        cached_ratio=divided(row.cached_seconds, alone.cached_seconds),
    )


def _peak_apart(case: Case, variant: str, threads: int) -> Peak | None:
    try:
        peak = call_apart(peak_of_step, case, variant, threads)
        return replace(peak, seconds=call_apart(seconds_of_step, case, variant, threads))
    except ProcessDied as error:
        click.echo(f"no peak of {variant}: {error}", err=True)
        return None


def _cached_apart(case: Case, variant: str, threads: int) -> float | None:
    """Return the seconds of the first step of the second process with one cache; None if nothing is compiled."""
    if not compiles(variant, case):
        return None
    with TemporaryDirectory() as folder:
        call_apart(first_step, case, variant, threads, folder)
        return call_apart(first_step, case, variant, threads, folder)


def first_step(case: Case, variant: str, threads: int, cache: str) -> float:
    """Return the seconds of the first step in this process, with the cache of Inductor in the folder `cache`."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(threads)
    _warm_up_compiler()
    training = Training(variant, model_of(case), case)
    return timed(lambda: training.step(tokens_of(case)))[0]


def peak_of_step(case: Case, variant: str, threads: int) -> Peak:
    """Return the peak of a step in this process, after two that compile and allocate gradients."""
    return_freed_memory()  # at once: blocks that malloc has kept are used again
    torch.set_num_threads(threads)
    training = Training(variant, model_of(case), case)
    tokens = tokens_of(case)

    def step() -> None:
        training.own.zero_grad(set_to_none=False)
        training.step(tokens)

    with _peaks_of_graphs() as peaks:
        step()
    step()
    return Peak(added_peak_bytes(step), training.kept(tokens), max(peaks, default=None))


def seconds_of_step(case: Case, variant: str, threads: int, rounds: int = 3) -> float:
    """Return the wall time of a step in this process, the best of the rounds after one that compiles."""
    torch.set_num_threads(threads)
    training = Training(variant, model_of(case), case)
    tokens = tokens_of(case)
    training.step(tokens)
    return min(timed(lambda: training.step(tokens))[0] for _ in range(rounds))


@contextmanager
def _peaks_of_graphs() -> Iterator[list[int]]:
    """Collect the peak bytes that Inductor's analysis of liveness states for each graph that it compiles here.

    Saved tensors count until the backward graph frees them, parameters and inputs do not.
    """
    from torch._inductor import config, memory

    found: list[int] = []
    reorder = memory.reorder_for_peak_memory

    def noted(nodes: Any, *buffers: Any) -> Any:
        ordered = reorder(nodes, *buffers)
        found.append(memory.prepare_planning_info(ordered, *buffers)[0])
        return ordered

    with mock.patch.object(memory, "reorder_for_peak_memory", noted), config.patch(force_disable_caches=True):
        yield found


def _warm_up_compiler() -> None:
    """Compile a small model, so that no variant's time has the compiler's own start in it."""
    small = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    torch.compile(small)(torch.randn(4, 8)).sum().backward()


@contextmanager
def _many_compilations() -> Iterator[None]:
    """Allow one function as many compilations as there are variants, and forget them at the end."""
    from torch._dynamo import config

    torch.compiler.reset()
    try:
        with config.patch(recompile_limit=4 * len(VARIANTS)):
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
