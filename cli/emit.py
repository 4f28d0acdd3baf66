"""`fewbit emit`: a table as source code or data for another program."""

from pathlib import Path

import click

from ..fewbit_gen import parse_activation, parse_weight
from ..fewbit_gen.library import find_or_solve
from ..fewbit_gen.solver import level_count
from ..tables import FewbitError
from .export import FORMATS, Bisect, choose_format, table_bytes, write_table
from .options import FILE, table_options
from .progress import with_clock


@click.command("emit")
@table_options
@click.option(  # without limit, since what is exported should not depend on the load of a machine
    "--effort",
    type=float,
    metavar="SECONDS",
    help="Seconds to spend on a table that has to be solved; the lower bound is the greatest one proven within them.  "
    "[default: no limit]",
)
@click.option(
    "--target",
    "--format",
    "target",
    type=click.Choice(FORMATS),
    help="Format to write.  [default: by the extension of FILE]",
)
@click.option(
    "--search",
    type=click.Choice(("bisect",)),
    help="Find codes in CUDA kernels by a binary search, as the paper's do.  [default: the cheapest way for the table]",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="File to write: .json .npz .csv .py .h .cuh.  [default: stdout]",
)
def command(
    activation: str,
    bits: int | None,
    levels: int | None,
    kind: str,
    weight: str,
    kinks: tuple[float, ...],
    effort: float | None,
    target: str | None,
    search: Bisect | None,
    output: Path | None,
) -> None:
    """Write a table as a C or CUDA header, a Python module or data.

    ACTIVATION is any that fewbit solve accepts. The shipped table is used where there is one; otherwise the table is
    solved.

    Example: fewbit emit gelu --bits 3 --target c -o gelu.h
    """
    output = None if output == Path("-") else output  # as elsewhere: standard output
    act, w = parse_activation(activation, kinks), parse_weight(weight)
    level_count(bits, levels)
    chosen = choose_format(output, target, kind)
    if output is None and chosen == "npz":
        raise FewbitError("npz is not text: name a file with -o")
    if search and chosen != "cuda":
        raise FewbitError(f"--search is of --target cuda, not {chosen}")
    table = with_clock(find_or_solve, act, bits, kind, w, levels, effort=effort, label="solving")
    if output is None:
        click.echo(table_bytes(table, chosen, search), nl=False)
        return
    write_table(table, output, chosen, search)
    click.echo(f"wrote {output}", err=True)
