"""Figures of commands: what they show, and the option, the checks and the lines that go with a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..fewbit_gen import Activation, Weight
from ..plots import Approximated, save_figure
from ..tables import Table
from .options import FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

trained_option = click.option(
    "--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE without training."
)


def approximated(activation: Activation, weight: Weight, tables: Sequence[Table]) -> Approximated:
    """Return `tables` with their derivative and weight, ready to be drawn."""
    return Approximated(activation.name, activation.derivative, weight.domain, tables, activation.kinks, weight.density)


def write_figure(
    figure: "Figure", output: Path, text: list[str] | None = None, written: list[Path] | None = None
) -> None:
    """Save `figure`, print `text`, and report the files written: `written` and the figure."""
    save_figure(figure, output)
    if text:
        click.echo("\n".join(text))
    for path in [*(written or []), output]:
        click.echo(f"wrote {path}", err=True)


def refuse_with_input(context: click.Context, done: str, *names: str) -> None:
    """Raise `UsageError` if options that control running a study were given with --input, which runs nothing."""
    given = [f"--{name}" for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if context.params["source"] and given:
        raise click.UsageError(f"--input draws what was {done} before: leave out {', '.join(given)}")
