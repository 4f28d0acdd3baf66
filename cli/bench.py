"""`fewbit bench`: how fast the few-bit activations and the compiler are beside others, measured here and now."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from ..tables.names import counted, find_name, nearest_names
from .bench_cuda import cuda_report
from .bench_glu import glu
from .bench_glu_bits import glu_bits
from .bench_kernels import kernels
from .bench_levels import levels
from .bench_outliers import outliers
from .bench_preact import preact
from .bench_quantizers import quantizers
from .options import FILE, bits_option, json_option
from .progress import with_progress

if TYPE_CHECKING:
    from ..fewbit_gen.bench import Measurement
    from ..runtime.bench import Overhead, Timing


_MET = {None: "", True: "yes", False: "no"}


class Shape(click.ParamType):
    """The shape of a tensor such as ``4096x4096``: a tuple of positive whole numbers."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the tuple, or fail with a line that says what is accepted."""
        if isinstance(value, tuple):
            return value
        sizes = value.lower().replace(",", "x").split("x")
        if not all(size.strip().isdecimal() and 0 < int(size) < 2**40 for size in sizes):
            self.fail(f"{value!r} is not a shape such as 4096x4096", param, ctx)
        return tuple(int(size) for size in sizes)


report_option = click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Write the measurements to FILE as JSON."
)


@click.group("bench")
def command() -> None:
    """Measure speed on this machine.

    Example: fewbit bench activation gelu silu --dtype bfloat16
    """


command.add_command(kernels)
command.add_command(quantizers)
command.add_command(levels)
command.add_command(outliers)
command.add_command(preact)
command.add_command(glu)
command.add_command(glu_bits)


@command.command("activation")
@click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)
@bits_option
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or float64.")
@click.option("--shape", type=Shape(), default="4096x4096", show_default=True, help="Shape of the tensor.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads for torch and fewbit.  [default: torch's]")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=15, show_default=True, help="Timings of each.")
@click.option("--bars", is_flag=True, help="Measure all that has a bar: four activations, two dtypes, 1 to 4 bits.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where.")
@report_option
@json_option
@click.pass_context
def activation(
    ctx: click.Context,
    activations: tuple[str, ...],
    bits: int,
    dtype: str,
    shape: tuple[int, ...],
    threads: int | None,
    rounds: int,
    bars: bool,
    device: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time forward, backward and both beside torch's own module, in one run; gelu if none is named.

    Both are timed in turn, and medians are printed: milliseconds, the ratio of the two, and GB/s of the bytes that must
    move. Last comes what a call costs on a tensor of 1,000 elements. Where there is a bar it is told whether it is met,
    and --bars measures all of them, forward and backward together.

    On a GPU it is GELU in three dtypes, of 2^20 to 2^29 elements and 1 to 8 bits, beside torch, torch.compile and a
    copy; --dtype, --shape and --bits choose among them.

    Example: fewbit bench activation gelu silu --dtype bfloat16 --bits 4
    """
    import torch

    from ..runtime import bench

    if device == "cuda":
        typed = click.core.ParameterSource.COMMANDLINE
        given = {name for name in ctx.params if ctx.get_parameter_source(name) == typed}
        if given & {"activations", "threads", "bars"}:
            raise click.UsageError("--device cuda measures GELU: only --dtype, --shape, --bits and --rounds choose")
        chosen = {name: ctx.params[name] for name in given & {"dtype", "shape", "bits", "rounds"}}
        _tell(*cuda_report(**chosen, writable=output), output, as_json)
        return
    if bars and activations:
        raise click.UsageError("--bars measures activations of its own: name none")
    names = [_module_name(name, bench.ACTIVATIONS) for name in activations or ("gelu",)]
    cases = [(name, dtype, [bits]) for name in names]
    if bars:
        cases = [(name, barred, list(bench.BAR_BITS)) for barred in bench.BAR_DTYPES for name in bench.BARS]
    passes = ("both",) if bars else bench.PASSES
    if output:
        check_writable(output)
    if threads:
        torch.set_num_threads(threads)
    timings, overheads = [], []
    for name, of_dtype, of_bits in with_progress(cases, len(cases), "measuring"):
        for count in of_bits:
            timings += bench.bench_activation(name, of_dtype, shape, count, rounds=rounds, passes=passes)
        overheads.append(bench.bench_overhead(name, of_dtype, of_bits[-1], rounds=rounds))
    report = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "timings": [timing.to_dict() for timing in timings],
        "overheads": [overhead.to_dict() for overhead in overheads],
    }
    heading = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {'x'.join(map(str, shape))}"
    small = "forward and backward of 1,000 elements, microseconds a call"
    text = [heading, *_timing_lines(timings), "", small, *_overhead_lines(overheads)]
    _tell(report, text, output, as_json)


@command.command("solve")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=5, show_default=True, help="Timings of each.")
@click.option("--build", is_flag=True, help="Time the build of all shipped tables too, which takes minutes.")
@report_option
@json_option
def solve(rounds: int, build: bool, output: Path | None, as_json: bool) -> None:
    """Time the compiler, beside kmeans1d, ruptures and the plain dynamic programme where they are installed.

    Each row is a problem and who solved it, with the median time, the error reached, the most memory its process held,
    and what time and memory it shall not exceed. Equal errors are equally good answers. Problems are GELU's, under
    the default weight; `solve` is what fewbit solve does without the certificate, `solver` the exact solver alone on n
    cells.

    Example: fewbit bench solve --build -o solve.json
    """
    from ..fewbit_gen import bench

    if output:
        check_writable(output)
    tasks = [*bench.TASKS, *([bench.BUILD] if build else [])]
    measurements = list(with_progress(bench.bench_solve(tasks, rounds), len(tasks), "measuring"))
    report = {
        "numpy": version("numpy"),
        "numba": version("numba"),
        "cores": bench.cores(),
        "measurements": [measurement.to_dict() for measurement in measurements],
    }
    heading = f"numpy {report['numpy']}, numba {report['numba']}, {counted(bench.cores(), 'core')}"
    _tell(report, [heading, *_solve_lines(measurements)], output, as_json)


def _tell(report: dict[str, Any], text: list[str], output: Path | None, as_json: bool) -> None:
    """Write `report` to `output`, if named, and print it, or `text`."""
    if output:
        with atomic_write(output) as stream:
            stream.write(dumps(report).encode())
    click.echo(dumps(report) if as_json else "\n".join(text) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


def _module_name(name: str, known: list[str]) -> str:
    found = find_name(name, known)
    if found is None:
        near = nearest_names(name, known)
        hint = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(known)}"
        raise FewbitError(f"no module {name!r} to measure; {hint}")
    return found


def _solve_lines(measurements: list["Measurement"]) -> list[str]:
    head = ("what", "kind", "by", "n", "K", "ms", "error", "peak MiB", "bar", "met")
    return list(columns([head, *map(_solve_row, measurements)], left=3))


def _solve_row(m: "Measurement") -> tuple[str, ...]:
    task = m.task
    bars = [
        *([f"{task.bar_ms:,.0f} ms"] if task.bar_ms else []),
        *([f"{task.bar_bytes / 2**20:,.0f} MiB"] if task.bar_bytes else []),
    ]
    return (
        *(task.what, task.kind or "both", task.solver),
        *(f"{number:,}" if number else "" for number in (task.n, task.K)),
        m.note or f"{m.ms:,.1f}",
        "" if m.error is None else f"{m.error:.9g}",
        "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:,.0f}",
        ", ".join(bars),
        _MET[m.met],
    )


def _timing_lines(timings: list["Timing"]) -> list[str]:
    head = ("activation", "dtype", "bits", "pass", "fewbit ms", "torch ms", "ratio", "bar", "met", "GB/s", "torch GB/s")
    body = [
        (
            *(t.activation, t.dtype, str(t.bits), t.which),
            *(f"{v:.2f}" for v in (t.fewbit_ms, t.torch_ms, t.ratio)),
            *("" if t.bar is None else f"{t.bar:.2f}", _MET[t.met]),
            *(f"{v:.1f}" for v in (t.fewbit_gbs, t.torch_gbs)),
        )
        for t in timings
    ]
    return list(columns([head, *body], left=4))


def _overhead_lines(overheads: list["Overhead"]) -> list[str]:
    from ..runtime.bench import OVERHEAD_BAR_US

    head = ("activation", "dtype", "bits", "fewbit us", "torch us", "difference us", "bar", "met")
    body = [
        (
            *(o.activation, o.dtype, str(o.bits)),
            *(f"{v:.1f}" for v in (o.fewbit_us, o.torch_us, o.difference_us, OVERHEAD_BAR_US)),
            _MET[o.met],
        )
        for o in overheads
    ]
    return list(columns([head, *body], left=3))
