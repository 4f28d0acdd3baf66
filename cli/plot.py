"""`fewbit plot`: figures of derivatives, their tables and errors."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import click

from ..fewbit_gen import Activation, parse_activation, parse_weight, solve
from ..fewbit_gen.build import ACTIVATIONS
from ..plots import Approximated, check_figure_path, plot_approximation, plot_error, save_figure
from ..tables import KINDS, Table
from .options import bits_list_option, figure_option, kind_option, weight_option
from .progress import with_progress


@click.group("plot")
def command() -> None:
    """Draw derivatives with their tables, and errors against bits.

    Example: fewbit plot approximation gelu --bits 1,2,3,4 -o gelu.png
    """


@command.command()
@click.argument("activations", metavar="ACTIVATION...", nargs=-1, required=True)
@bits_list_option
@kind_option
@weight_option
@figure_option
def approximation(activations: tuple[str, ...], bits: tuple[int, ...], kind: str, weight: str, output: Path) -> None:
    """Draw derivatives and their tables, one row an activation, one panel a number of bits.

    Example: fewbit plot approximation gelu silu --bits 1,2,3,4 -o figure.png
    """
    check_figure_path(output)
    domain = parse_weight(weight).domain
    tables = _solve(activations, bits, (kind,), weight)
    rows = [Approximated(a.name, a.derivative, domain, tables[a], a.kinks) for a in tables]
    save_figure(plot_approximation(rows), output)
    click.echo(f"wrote {output}", err=True)


@command.command()
@click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)
@bits_list_option
@click.option(
    "--kind",
    type=click.Choice([*KINDS, "both"]),
    default="both",
    show_default=True,
    help="Whether intervals may share a level.",
)
@weight_option
@figure_option
def error(activations: tuple[str, ...], bits: tuple[int, ...], kind: str, weight: str, output: Path) -> None:
    """Draw error against bits, by activation and kind; without ACTIVATION, for all that are shipped.

    Example: fewbit plot error gelu silu --bits 1,2,3,4 -o error.png
    """
    check_figure_path(output)
    tables = _solve(activations or ACTIVATIONS, bits, KINDS if kind == "both" else (kind,), weight)
    save_figure(plot_error([table for solved in tables.values() for table in solved]), output)
    click.echo(f"wrote {output}", err=True)


def _solve(
    names: Sequence[str], bits: Sequence[int], kinds: Sequence[str], weight: str
) -> dict[Activation, tuple[Table, ...]]:
    """Return the tables of every activation, each once: an exact one holds for more bits too."""
    activations = list({a.name: a for a in map(parse_activation, names)}.values())
    problems = list(itertools.product(activations, kinds, bits))
    tables: dict[Activation, dict[Table, None]] = {activation: {} for activation in activations}
    for activation, kind, b in with_progress(problems, len(problems), "solving"):
        tables[activation][solve(activation, b, kind, weight)] = None
    return {activation: tuple(solved) for activation, solved in tables.items()}
