"""The command line of the calls, and the order of their parts."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from ....tables.columns import columns
from .apart import MODULE, Part, run_parts
from .record import Record, Row, about, finite

_COUNTS = ("passed", "of", "failed", "skipped")
_WIDTH = 240  # of a line of what is wrong
_AT_ONCE = {"layer": 10, "model": 3}  # as memory allows: 5 and 25 GiB each
# Of each process that compiles beside others.
_FEW_COMPILERS = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
_CORES = 16  # processes at the same time, where nothing is timed


def _of_call(call: Callable[..., None]) -> Callable[..., None]:
    """Return a call with the options that all have."""
    for option in (
        click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The JSON to write."),
        click.option("--limit", type=float, default=590.0, show_default=True, help="Seconds for all of it."),
        click.option("--toy", is_flag=True, help="On the CPU, in sizes that show nothing."),
        click.option("--fresh", is_flag=True, help="Begin anew, and do not go on where another call stopped."),
    ):
        call = option(call)
    return call


@click.group()
def command() -> None:
    """Show on a GPU what only a GPU can show."""


@command.command()
@_of_call
@click.option("--only", multiple=True, help="A check; may be repeated.")
def checks(output: Path, limit: float, toy: bool, fresh: bool, only: tuple[str, ...]) -> None:
    """Check what a first use can break: each in its own process, all at the same time."""
    from .checks import CHECKS

    device = "cpu" if toy else "cuda"
    record = Record(output, about(device, toy), fresh)
    parts = [
        Part(name, (*MODULE, "check", name, "--device", device), environment=_FEW_COMPILERS) for name in only or CHECKS
    ]
    run_all(record, parts, 2 if toy else _CORES, limit)
    click.echo("\n".join(lines_of(record)))


@command.command("tests")
@_of_call
@click.option("--sample", type=float, default=1.0, show_default=True, help="Share of the tests; 0.1 takes a minute.")
@click.option("--processes", type=int, default=8, show_default=True)
def run_tests(output: Path, limit: float, toy: bool, fresh: bool, sample: float, processes: int) -> None:
    """Run the tests that need a GPU, a tenth of them first, with compute-sanitizer beside them."""
    from .suite import parts

    record = Record(output, about("cpu" if toy else "cuda", toy), fresh)
    for stage in parts(sample, processes, toy):
        run_all(record, stage, len(stage), limit - record.age)
    click.echo("\n".join(lines_of(record)))


@command.command()
@click.argument("tool")
def sanitize(tool: str) -> None:
    """Run one tool of compute-sanitizer over calls of every family."""
    from .suite import sanitized

    say(sanitized(tool))


def _benches(output: Path, limit: float, toy: bool, fresh: bool, name: str) -> None:
    from .benches import parts_of

    record = Record(output, about("cpu" if toy else "cuda", toy), fresh)
    run_all(record, parts_of(name, output.absolute().parent, limit, toy), 1, limit)
    click.echo("\n".join(lines_of(record)))


@command.command("kernels")
@_of_call
def kernels_call(output: Path, limit: float, toy: bool, fresh: bool) -> None:
    """Time each kernel beside a copy, count what binds it by ncu, and time activations."""
    _benches(output, limit, toy, fresh, "kernels")


@command.command("rest")
@_of_call
def rest_call(output: Path, limit: float, toy: bool, fresh: bool) -> None:
    """Run the other benches: gated MLPs, pre-activation layers, V-Quant, levels, activations of all sizes."""
    _benches(output, limit, toy, fresh, "rest")


@command.command("counters")
def counters_apart() -> None:
    """Count by ncu what binds each kernel."""
    from .benches import counters

    say(counters())


@command.command()
@_of_call
@click.option("--layers", type=int, help="Blocks of the model.  [default: 16]")
@click.option("--problem", "problems", multiple=True, help="layer or model; may be repeated.  [default: both]")
@click.option("--way", "ways", multiple=True, help="May be repeated.  [default: all]")
def trainings(
    output: Path,
    limit: float,
    toy: bool,
    fresh: bool,
    layers: int | None,
    problems: tuple[str, ...],
    ways: tuple[str, ...],
) -> None:
    """Train a layer of Llama-3-8B and a model of Llama-3.2-1B's form in every way: peak, time, loss."""
    from .trainings import LOCK, PROBLEMS, WAYS, lines

    record = Record(output, {**about("cpu" if toy else "cuda", toy), "layers": layers}, fresh)
    with TemporaryDirectory() as folder:
        shared = {LOCK: f"{folder}/lock", **_FEW_COMPILERS}
        for number, problem in enumerate(problems or PROBLEMS):
            how = ("--layers", str(layers or 0), *(("--toy",) if toy else ()))
            parts = [
                Part(f"{problem}: {way}", (*MODULE, "train", problem, way, *how), environment=shared)
                for way in ways or WAYS
                if problem in WAYS[way].problems
            ]
            # The layer comes first and may not take all the time.
            left = (limit - record.age) * (0.55 if number + 1 < len(problems or PROBLEMS) else 1)
            run_all(record, parts, 1 if toy else _AT_ONCE[problem], left)
    click.echo("\n".join([*lines_of(record), *columns(list(lines(record.rows)), left=1)]))


@command.command("train")
@click.argument("problem")
@click.argument("way")
@click.option("--layers", type=int, default=0)
@click.option("--toy", is_flag=True)
def train_apart(problem: str, way: str, layers: int, toy: bool) -> None:
    """Train one problem in one way; print a line of JSON whenever more is known."""
    from .trainings import problem_of, train

    say(train(problem_of(problem, layers, toy), way, "cpu" if toy else "cuda"))


@command.command("page")
@click.argument("results", type=click.Path(path_type=Path))
def write_page(results: Path) -> None:
    """Put the tables of the calls' files in RESULTS into gpu.md there."""
    from .tables import page

    path = results / "gpu.md"
    path.write_text(page(path.read_text(), results))


@command.command()
@click.argument("name")
@click.option("--device", default="cuda")
def check(name: str, device: str) -> None:
    """Run one check; print a line of JSON whenever it knows more."""
    from .checks import CHECKS

    say(CHECKS[name](device))


def say(found: Iterable[dict[str, Any]]) -> None:
    """Print each as a line of JSON, at once."""
    for one in found:
        print(json.dumps(finite(one)), flush=True)


def run_all(record: Record, parts: Iterable[Part], at_once: int, limit: float) -> None:
    """Run the parts that the record lacks, within `limit` seconds, and add a row for each as it ends."""
    deadline = time.monotonic() + limit
    missing = [part for part in parts if record.rows.get(part.name, {}).get("state") not in ("ok", "failed")]
    for part, row in run_parts(missing, at_once, deadline):
        record.add(part.name, row)
        click.echo(f"{row['state']:10} {part.name}", err=True)


def lines_of(record: Record) -> Iterator[str]:
    """Yield a table of the record: a line for each row, and below it what went wrong."""
    of = record.about
    yield f"{of['device']}, torch {of['packages'].get('torch')}, commit {of['commit']}"
    rows = [
        (
            row["state"],
            name,
            f"{row.get('seconds', 0):.1f} s",
            " ".join(f"{row[key]} {key}" for key in _COUNTS if key in row),
        )
        for name, row in record.rows.items()
    ]
    yield from columns([("", "part", "time", ""), *rows], left=2)
    for name, row in record.rows.items():
        if row["state"] != "ok":
            yield from (f"{name}: {line[:_WIDTH]}" for line in _faults(row))


def _faults(row: Row) -> Iterator[str]:
    """Yield a line for each thing that a row says is wrong."""
    for one in row.get("failures", ()):
        yield f"{one['count']} x {one['message']}  ({one['tests'][0]})"
    for name, said in {**row, **row.get("problems", {})}.items():
        told = isinstance(said, str) and said != "ok" and name != "state"
        if told or (isinstance(said, dict) and any(part is False for part in said.values())):
            yield f"{name}: {said if told else json.dumps(said)}"
    yield from (f"    {line}" for line in row.get("errors", ())[-3:])
