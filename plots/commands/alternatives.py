"""`fewbit plot alternatives`: a figure of the ways to train with less memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.options import FILE, figure_option
from .study import Numbers, run_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@click.command("alternatives")
@click.argument("report", metavar="REPORT", type=FILE)
@figure_option
def alternatives(report: Path, output: Path) -> None:
    """Draw what fewbit bench alternatives measured: time against peak, and the names of what nothing beats.

    Example: fewbit plot alternatives plots/results/alternatives-cpu.json -o alternatives.png
    """
    from ..figures.alternatives import plot_alternatives

    def draw(numbers: Numbers) -> "Figure":
        return plot_alternatives(numbers["rows"], f"{numbers['device']}, {numbers['threads']} threads")

    writers = "`fewbit bench alternatives`"
    run_study("alternatives", report, output, lambda _: {}, lambda _: [], draw, writers=writers)


COMMANDS = (alternatives,)
