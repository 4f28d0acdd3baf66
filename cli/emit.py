"""`fewbit emit`: a table as source code or data, to build into another program."""

from pathlib import Path

import click

from ..fewbit_gen import parse_activation, parse_weight, solve
from ..tables import FewbitError, Table
from ..tables.exporters import export, write_export
from ..tables.shipped import find_table
from ..tables.table import check_bits
from .export import FORMATS, choose_format
from .options import (
    FILE,
    activation_argument,
    bits_or_levels_option,
    kind_option,
    kinks_option,
    levels_option,
    weight_option,
)


@click.command("emit")
@activation_argument
@bits_or_levels_option
@levels_option
@kind_option
@weight_option
@kinks_option
@click.option(
    "--target",
    "--format",
    "target",
    type=click.Choice(FORMATS),
    help="What to write, if not what the name of FILE says.",
)
@click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Where to write it: .json .npz .csv .py .h.  [default: stdout]"
)
def command(
    activation: str,
    bits: int | None,
    levels: int | None,
    kind: str,
    weight: str,
    kinks: tuple[float, ...],
    target: str | None,
    output: Path | None,
) -> None:
    """Write a table as a C header, a Python module or data.

    ACTIVATION is whatever fewbit solve takes. The table is the one that comes with fewbit where there is one, and is
    solved for otherwise.

    Example: fewbit emit gelu --bits 3 --target c -o gelu.h
    """
    chosen = choose_format(output, target)
    if output is None and chosen == "npz":
        raise FewbitError("npz is not text: name a file with -o")
    act, w = parse_activation(activation, kinks), parse_weight(weight)
    table = _shipped(act.name, bits, levels, kind, w.spec)
    if table is None:
        table = solve(act, bits=bits, levels=levels, kind=kind, weight=w)
    if output is None:
        click.echo(export(table, chosen), nl=False)
        return
    write_export(table, output, chosen)
    click.echo(f"wrote {output}", err=True)


def _shipped(activation: str, bits: int | None, levels: int | None, kind: str, weight: str) -> Table | None:
    """Return the shipped table that solving would return; None where there is none, or what is asked for is wrong."""
    if levels is not None:
        if bits is not None or levels not in (2**b for b in range(1, 9)):
            return None
        bits = levels.bit_length() - 1
    return find_table(activation, check_bits(3 if bits is None else bits), kind, weight)
