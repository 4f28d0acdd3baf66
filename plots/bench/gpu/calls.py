"""The command line of the calls, and the order of their parts."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from ....tables.columns import columns
from .apart import MODULE, Part, run_parts
from .record import Record, Row, about, finite

_COUNTS = ("passed", "of", "failed", "skipped")
_WIDTH = 240  # of a line of what is wrong
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
    parts = [Part(name, (*MODULE, "check", name, "--device", device)) for name in only or CHECKS]
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
