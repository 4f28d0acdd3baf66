"""`fewbit plot variance`: variance of gradients due to compression, and its causes."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.figure import refuse_with_input
from ...cli.options import FILE, figure_option
from ...tables.columns import columns
from .study import Numbers, Save, run_study, steps_bar

if TYPE_CHECKING:
    from ..figures.variance import Variances


@click.command("variance")
@click.option(
    "--bits",
    type=click.IntRange(1, 8),
    default=2,
    show_default=True,
    help="Bits at which the variance is split by layer.",
)
@click.option(
    "--draws",
    type=click.IntRange(2, 10_000),
    default=24,
    show_default=True,
    help="Gradients to draw for each variance.",
)
@click.option(
    "--steps",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    help="Steps of exact training before measuring.",
)
@click.option("--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE without measuring.")
@figure_option
@click.pass_context
def variance(context: click.Context, bits: int, draws: int, steps: int, source: Path | None, output: Path) -> None:
    """Measure and draw the variance of gradients from compressed activations, as ActNN's Theorem 3 splits it.

    A small ResNet learns scikit-learn's digits exactly for some steps. Then its gradients are computed repeatedly with
    compressed activations. Drawn are the variance of each weight's gradient by the layer that causes it, beside that
    of all layers compressed at once; the variance that the sensitivities predict; and the total variance against bits,
    with a range per tensor, a range per group, bits per sample and mixed precision.

    The numbers are written beside the figure as .json. At the defaults this takes two minutes.

    Example: fewbit plot variance -o variance.png
    """
    from ..figures.variance import plot_variance

    refuse_with_input(context, "measured", "bits", "draws", "steps")

    def run(_: Save) -> Numbers:
        import torch

        from ..studies.variance import VarianceSettings, measure, passes

        settings = VarianceSettings(bits=bits, draws=draws, steps=steps)
        torch.manual_seed(settings.seed)
        with steps_bar(passes(settings), "measuring") as after_pass:
            return measure(settings, after_pass).to_dict()

    run_study("variance", source, output, run, _lines, plot_variance, read=_variances, packages=("scikit-learn",))


def _variances(numbers: Numbers, _: str) -> "Variances":
    from ..figures.variance import Variances

    names = set(Variances.__dataclass_fields__) - {"bits"}
    return Variances(bits=numbers["settings"]["bits"], **{name: numbers[name] for name in names})


def _lines(data: "Variances") -> list[str]:
    head = ("layer", "own context", "later ones", "their sum", "measured", "minibatch", "caused", "by sensitivity")
    body = []
    for i, layer in enumerate(data.layers):
        row, caused = data.terms[i], sum(line[i] for line in data.terms)
        numbers = (row[i], sum(row) - row[i], sum(row), data.empirical[i], data.sampling[i], caused, data.formula[i])
        body.append((layer, *(f"{number:.2e}" for number in numbers)))
    bits = sorted({row[0] for rows in data.curves.values() for row in rows})
    head_of_curves = ("variance / squared norm", *(f"{b:g} bits" for b in bits))
    curves = []
    for method, rows in data.curves.items():
        found = {row[0]: row[1] / data.squared_norm for row in rows}
        curves.append((method, *(f"{found[b]:.2e}" if b in found else "" for b in bits)))
    return [*columns([head, *body], left=1), "", *columns([head_of_curves, *curves], left=1)]


COMMANDS = (variance,)
