"""`fewbit plot variance`: how much noise few bits bring into gradients, and where it comes from."""

import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps, read_json
from .options import FILE, figure_option

if TYPE_CHECKING:
    from ..plots.figures.variance import Variances


@click.command("variance")
@click.option("--bits", type=click.IntRange(1, 8), default=2, show_default=True, help="At which it is split by layer.")
@click.option("--draws", type=click.IntRange(2, 10_000), default=24, show_default=True, help="Of everything random.")
@click.option(
    "--steps", type=click.IntRange(0, 10_000), default=100, show_default=True, help="Of exact training before."
)
@click.option("--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE, and measure nothing.")
@figure_option
@click.pass_context
def variance(context: click.Context, bits: int, draws: int, steps: int, source: Path | None, output: Path) -> None:
    """Measure and draw the variance of gradients from compressed activations, as ActNN's Theorem 3 splits it.

    A small ResNet learns scikit-learn's digits exactly for some steps. Then its gradients are computed over and over
    with compressed activations: the variance of each weight's gradient by the layer that causes it, beside that of all
    at once; what the sensitivities say of it; and the variance of all against bits, for a range a tensor, a range a
    group, bits for each sample and mixed precision.

    The numbers are written beside the figure, as .json. At the defaults this takes a minute.

    Example: fewbit plot variance -o variance.png
    """
    from ..plots import check_figure_path, save_figure
    from ..plots.figures.variance import plot_variance

    check_figure_path(output)
    if source:
        typed = [
            n for n in ("bits", "draws", "steps") if context.get_parameter_source(n) is ParameterSource.COMMANDLINE
        ]
        if typed:
            raise click.UsageError(f"--input draws what was measured before: leave out --{', --'.join(typed)}")
        report = read_json(source)
        written = [output]
    else:
        written = [output.with_suffix(".json"), output]
        check_writable(written[0])
        report = _measure(bits, draws, steps)
        with atomic_write(written[0]) as stream:
            stream.write(dumps(report).encode())
    data = _variances(report, source)
    save_figure(plot_variance(data), output)
    click.echo("\n".join([*_layer_lines(data), "", *_curve_lines(data)]))
    for path in written:
        click.echo(f"wrote {path}", err=True)


def _measure(bits: int, draws: int, steps: int) -> dict[str, Any]:
    import torch

    from ..plots.studies.variance import VarianceSettings, measure, passes

    settings = VarianceSettings(bits=bits, draws=draws, steps=steps)
    torch.manual_seed(settings.seed)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=passes(settings), label="measuring", file=sys.stderr, hidden=hidden) as bar:
        try:
            study = measure(settings, lambda: bar.update(1))
        except ModuleNotFoundError as error:
            raise FewbitError(f"the digits come with scikit-learn: pip install scikit-learn ({error})") from None
    versions = {"fewbit": version("fewbit"), "torch": torch.__version__}
    return {"versions": versions, **study.to_dict()}


def _variances(report: Any, source: Path | None) -> "Variances":
    from ..plots.figures.variance import Variances

    try:
        names = set(Variances.__dataclass_fields__) - {"bits"}
        found: Mapping[str, Any] = {name: report[name] for name in names}
        return Variances(bits=report["settings"]["bits"], **found)
    except (KeyError, TypeError, IndexError):
        raise FewbitError(f"{source}: not what `fewbit plot variance` writes") from None


def _layer_lines(data: "Variances") -> list[str]:
    head = ("layer", "own context", "later ones", "their sum", "measured", "minibatch", "caused", "by sensitivity")
    body = []
    for i, layer in enumerate(data.layers):
        row, caused = data.terms[i], sum(line[i] for line in data.terms)
        numbers = (row[i], sum(row) - row[i], sum(row), data.empirical[i], data.sampling[i], caused, data.formula[i])
        body.append((layer, *(f"{number:.2e}" for number in numbers)))
    return list(columns([head, *body], left=1))


def _curve_lines(data: "Variances") -> list[str]:
    bits = sorted({row[0] for rows in data.curves.values() for row in rows})
    head = ("variance / squared norm", *(f"{b:g} bits" for b in bits))
    body = []
    for method, rows in data.curves.items():
        found = {row[0]: row[1] / data.squared_norm for row in rows}
        body.append((method, *(f"{found[b]:.2e}" if b in found else "" for b in bits)))
    return list(columns([head, *body], left=1))
