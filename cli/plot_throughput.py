"""`fewbit plot throughput`: the report of a GPU's benchmark as a figure."""

import json
from pathlib import Path

import click

from ..plots import check_figure_path, save_figure
from ..plots.figures.throughput import plot_throughput
from ..tables import FewbitError
from ..tables.files import reason
from .options import FILE, bits_option, figure_option


@click.command("throughput")
@click.argument("report", metavar="REPORT", type=FILE)
@bits_option
@figure_option
def throughput(report: Path, bits: int, output: Path) -> None:
    """Draw what fewbit bench activation --device cuda measured: GB/s against size, beside torch and a copy.

    Example: fewbit plot throughput plots/results/activation-cuda.json -o throughput.png
    """
    check_figure_path(output)
    try:
        read = json.loads(report.read_bytes())
        figure = plot_throughput(read["rows"], read["device"], bits)
    except OSError as error:
        raise FewbitError(f"cannot read {report}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FewbitError(f"{report} is no report of fewbit bench activation --device cuda: {error!r}") from None
    save_figure(figure, output)
    click.echo(f"wrote {output}", err=True)
