"""`fewbit plot throughput`: a figure of the report of a GPU benchmark."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.options import FILE, bits_option, figure_option
from .study import Numbers, run_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@click.command("throughput")
@click.argument("report", metavar="REPORT", type=FILE)
@bits_option
@figure_option
def throughput(report: Path, bits: int, output: Path) -> None:
    """Draw what fewbit bench activation --device cuda measured: GB/s against size, beside torch and a copy.

    Example: fewbit plot throughput plots/results/activation-cuda.json -o throughput.png
    """
    from ..figures.throughput import plot_throughput

    def draw(numbers: Numbers) -> "Figure":
        return plot_throughput(numbers["rows"], numbers["device"], bits)

    writers = "`fewbit bench activation --device cuda`"
    run_study("throughput", report, output, lambda _: {}, lambda _: [], draw, writers=writers)


COMMANDS = (throughput,)
