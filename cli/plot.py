"""`fewbit plot`: figures of derivatives, their tables and errors."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import click

from ..fewbit_gen import Activation, Weight, parse_activation, parse_weight
from ..fewbit_gen.activations import EXAMPLES
from ..fewbit_gen.library import find_or_solve
from ..plots import check_figure_path, plot_approximation, plot_error, plot_gallery, plot_kinds
from ..tables import DETERMINISTIC, KINDS, Table
from .figure import approximated, write_figure
from .lazy import WholeHelpGroup, add_studies
from .options import BitsList, bits_list_option, bits_option, figure_option, kind_option, weight_option
from .progress import with_progress

PAPER = ("relu", "gelu", "silu", "sigmoid", "tanh", "selu", "softplus")  # Table 3 of the Few-bit Backward paper
KINDS_DIFFER = ("gelu", "tanh", "selu")  # f' with a bump, an even f', an f' with a jump

activations_argument = click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)


@click.group("plot", cls=WholeHelpGroup)
def command() -> None:
    """Draw derivatives with their tables, errors against bits, and, in a clone, trainings in few bits.

    Example: fewbit plot approximation gelu --bits 1,2,3,4 -o gelu.png
    """


STUDIES = {
    "throughput": ("throughput",),
    "alternatives": ("alternatives",),
    "memory": ("memory",),
    "training": ("training",),
    "variance": ("variance",),
    "adaptation": ("adaptation",),
    "blpa": ("gradient-noise", "blpa-memory"),
    "vquant": ("vquant-accuracy", "vquant-annealing", "vquant-inference", "vquant-lstm", "vquant-memory"),
}
add_studies(command, STUDIES)


@command.command()
@click.argument("activations", metavar="ACTIVATION...", nargs=-1, required=True)
@bits_list_option
@kind_option
@weight_option
@figure_option
def approximation(activations: tuple[str, ...], bits: tuple[int, ...], kind: str, weight: str, output: Path) -> None:
    """Draw derivatives and their tables: a row per activation, a panel per number of bits.

    The weight is drawn behind the derivative unless it is constant.

    Example: fewbit plot approximation gelu silu --bits 1,2,3,4 -o figure.png
    """
    check_figure_path(output)
    w = parse_weight(weight)
    tables = _tables(activations, bits, (kind,), w)
    write_figure(plot_approximation([approximated(a, w, tables[a]) for a in tables]), output)


@command.command()
@activations_argument
@bits_option
@kind_option
@weight_option
@click.option("--columns", type=click.IntRange(1, 20), default=4, show_default=True, help="Panels side by side.")
@figure_option
def gallery(activations: tuple[str, ...], bits: int, kind: str, weight: str, columns: int, output: Path) -> None:
    """Draw many derivatives with one table each; without ACTIVATION, of every named activation.

    Example: fewbit plot gallery --bits 2 --weight normal:0,1 -o gallery.png
    """
    check_figure_path(output)
    w = parse_weight(weight)
    tables = _tables(activations or EXAMPLES, (bits,), (kind,), w)
    write_figure(plot_gallery([approximated(a, w, tables[a]) for a in tables], columns), output)


@command.command()
@activations_argument
@bits_option
@weight_option
@figure_option
def kinds(activations: tuple[str, ...], bits: int, weight: str, output: Path) -> None:
    """Draw tables of kinds interval and shared side by side, a row per activation; by default three that differ.

    Example: fewbit plot kinds gelu tanh --bits 2 -o kinds.png
    """
    check_figure_path(output)
    w = parse_weight(weight)
    tables = _tables(activations or KINDS_DIFFER, (bits,), DETERMINISTIC, w)
    write_figure(plot_kinds([approximated(a, w, tables[a]) for a in tables]), output)


@command.command()
@activations_argument
@click.option(
    "--bits",
    type=BitsList(),
    metavar="N,...",
    default="1,2,3,4,5,6,7,8",
    show_default=True,
    help="Bits per element, each 1 to 8.",
)
@click.option(
    "--kind",
    type=click.Choice([*KINDS, "both"]),
    default="both",
    show_default=True,
    help="shared: intervals may share a level; interval: each has its own.",
)
@weight_option
@figure_option
def error(activations: tuple[str, ...], bits: tuple[int, ...], kind: str, weight: str, output: Path) -> None:
    """Draw error and lower bound against bits, by activation and kind; without ACTIVATION, for the paper's.

    Example: fewbit plot error gelu silu --bits 1,2,3,4 -o error.png
    """
    check_figure_path(output)
    tables = _tables(activations or PAPER, bits, DETERMINISTIC if kind == "both" else (kind,), parse_weight(weight))
    write_figure(plot_error([table for found in tables.values() for table in found]), output)


def _tables(
    names: Sequence[str], bits: Sequence[int], kinds: Sequence[str], weight: Weight
) -> dict[Activation, tuple[Table, ...]]:
    """Return the tables of every activation by kind and bits, each once: an exact table serves more bits too."""
    activations = list({a.name: a for a in map(parse_activation, names)}.values())
    problems = list(itertools.product(activations, kinds, bits))
    tables: dict[Activation, dict[Table, None]] = {activation: {} for activation in activations}
    for activation, kind, b in with_progress(problems, len(problems), "solving"):
        tables[activation][find_or_solve(activation, b, kind, weight)] = None
    return {activation: tuple(found) for activation, found in tables.items()}
