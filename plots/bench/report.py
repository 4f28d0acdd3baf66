"""The command line shared by all benches: options, description of the machine, output of reports."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ...cli.options import FILE, json_option
from ...tables import FewbitError
from ...tables.files import atomic_write, check_writable
from ...tables.json_format import dumps

MET = {None: "", True: "yes", False: "no"}  # by whether the bar is met; None: there is no bar

_output_option = click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Write the measurements to FILE as JSON."
)
_threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Threads for torch and fewbit.  [default: torch's]",
)
_device_option = click.option(
    "--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Device to run on."
)


@dataclass(frozen=True)
class Report:
    """Result of a bench.

    Attributes:
        values: for JSON output.
        lines: for text output.
        failed: whether the exit status is 1.
    """

    values: dict[str, Any]
    lines: Sequence[str]
    failed: bool = False


@dataclass(frozen=True)
class Machine:
    """The hardware and threads that torch uses.

    Attributes:
        torch: version of torch.
        threads: number of CPU threads.
        gpu: name of the GPU; None on the CPU.
    """

    torch: str
    threads: int
    gpu: str | None = None

    @property
    def device(self) -> str:
        """The GPU's name, or ``cpu``."""
        return self.gpu or "cpu"

    @property
    def where(self) -> str:
        """The GPU's name, or the number of CPU threads."""
        return self.gpu or f"{self.threads} threads"


def this_machine(device: str = "cpu") -> Machine:
    """Return the hardware that torch uses for "cpu" or "cuda"."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(torch.__version__, torch.get_num_threads(), gpu)


def rounds_option(default: int = 15, help: str = "Timings of each.", name: str = "--rounds") -> Callable[..., Any]:
    """Return the option for the number of timings of each contestant."""
    return click.option(
        name, type=click.IntRange(1, 10_000), metavar="N", default=default, show_default=True, help=help
    )


def bench_command(
    name: str, *, threads: bool = False, device: bool = False, json: bool = True
) -> Callable[[Callable[..., Report | Iterator[Report]]], click.Command]:
    """Return a decorator that turns a function returning a `Report` into the command `name`.

        @bench_command("preact", threads=True, device=True)
        @rounds_option()
        def command(rounds: int, device: str) -> Report: ...

    The command has the option --output and, if requested, --threads, --device and --json; the function receives only
    --device of these. The output path and the presence of a GPU are checked before anything is measured. A function
    that measures for long may yield reports, each with what there is so far: all are written, the last one is printed.
    """
    shared = [_threads_option] * threads + [_device_option] * device + [_output_option] + [json_option] * json

    def decorate(measure: Callable[..., Report | Iterator[Report]]) -> click.Command:
        @wraps(measure)
        def run(output: Path | None, as_json: bool = False, **options: Any) -> None:
            if output:
                check_writable(output)
            _prepare(options.get("device"), options.pop("threads", None))
            measured, last = measure(**options), None
            for last in [measured] if isinstance(measured, Report) else measured:
                if output:
                    with atomic_write(output) as stream:
                        stream.write(dumps(last.values).encode())
            assert last is not None, "a bench measures something"
            click.echo(dumps(last.values) if as_json else "\n".join(last.lines) + "\n", nl=False)
            if output:
                click.echo(f"wrote {output}", err=True)
            if last.failed:
                raise click.exceptions.Exit(1)

        command = click.command(name)(run)
        for option in shared:
            option(command)
        return command

    return decorate


def _prepare(device: str | None, threads: int | None) -> None:
    if device != "cuda" and not threads:
        return
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise FewbitError("no CUDA GPU here: torch.cuda.is_available() is False")
    if threads:
        torch.set_num_threads(threads)
