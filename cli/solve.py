"""`fewbit solve`: solve for one table and print, save or draw it."""

import time
from pathlib import Path

import click

from ..fewbit_gen import Activation, Weight, parse_activation, parse_weight, solve
from ..fewbit_gen.solver import uniform_error
from ..fewbit_gen.stochastic import covered
from ..tables import FewbitError, Table
from ..tables.files import check_writable
from ..tables.json_format import dumps
from ..tables.table import table_to_dict
from .export import FORMATS, choose_format, write_table
from .options import (
    FILE,
    json_option,
    table_options,
)
from .progress import with_clock
from .proofs import write_proof
from .text import table_text


@click.command("solve")
@table_options
@click.option("-o", "--output", type=FILE, metavar="FILE", help="File to write: .json .npz .csv .py .h .cuh.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="Format of FILE.  [default: by its extension]",
)
@click.option(
    "--effort",
    type=float,
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Seconds to spend; the lower bound is the greatest one proven within them.",
)
@json_option
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the derivative and its table: .png, .svg or .pdf.")
@click.option(
    "--proof",
    type=FILE,
    metavar="FILE",
    help="Write a proof of the lower bound, to a millionth, for up to 16 levels of a shipped activation under a weight "
    "uniform:A,B or normal:MEAN,DEVIATION; `python -m fewbit.proofs FILE` checks it without the solver.",
)
def command(
    activation: str,
    bits: int | None,
    levels: int | None,
    kind: str,
    weight: str,
    output: Path | None,
    file_format: str | None,
    kinks: tuple[float, ...],
    effort: float,
    as_json: bool,
    plot: Path | None,
    proof: Path | None,
) -> None:
    """Solve for the best few-bit table of an activation's derivative.

    ACTIVATION is a name such as gelu, a name with numbers such as "softplus(beta=2)", or an expression in x
    such as "x*sigmoid(1.702*x)".

    Example: fewbit solve gelu --bits 3 -o gelu.json --plot gelu.png
    """
    if output or file_format:
        file_format = choose_format(output, file_format, kind)
    if file_format and not output:
        raise FewbitError("--format says what a file holds: name the file with -o")
    if plot:
        from ..plots import check_figure_path  # load matplotlib only for a picture

        check_figure_path(plot)
    if proof:
        check_writable(proof)
    act, w = parse_activation(activation, kinks), parse_weight(weight)
    if proof:
        from ..fewbit_gen.proof import check_provable

        check_provable(act.name, w.spec)  # before it is solved, which may take ten seconds
    start = time.perf_counter()
    table = with_clock(solve, act, bits=bits, levels=levels, kind=kind, weight=w, effort=effort, label="solving")
    seconds = time.perf_counter() - start
    # Write files before printing: a reader that closes the pipe early (`| head`) does not prevent them.
    if output and file_format:
        write_table(table, output, file_format)
    if plot:
        _draw(table, act, w, plot)
    if proof:
        with_clock(write_proof, table, proof, label="proving")
    if as_json:
        click.echo(dumps(table_to_dict(table)), nl=False)
    else:
        at_random = kind == "stochastic" and table.error > 0
        uniform = uniform_error(act, w, table.levels.size) if at_random else None
        click.echo(table_text(table, seconds, uniform, covered(act, w) if at_random else None))
    for path in filter(None, (output, plot, proof)):
        click.echo(f"wrote {path}", err=True)


def _draw(table: Table, activation: Activation, weight: Weight, path: Path) -> None:
    from ..plots import plot_approximation, save_figure
    from .figure import approximated

    save_figure(plot_approximation([approximated(activation, weight, [table])]), path)
