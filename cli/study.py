"""What the commands share that run a study, write its numbers as JSON, print a table of them and draw them."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.files import atomic_write, check_writable, reason
from ..tables.json_format import dumps
from .options import FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = dict[str, Any]

input_option = click.option(
    "--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE, and run nothing."
)

# `fewbit plot training` is one command for all of them (plot_training.py).
METHODS = ("fewbit", "blpa", "actnn", "glu", "hooks")


def method_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option --method of a training's command, which is run for the method `default`."""
    return click.option(
        "--method",
        type=click.Choice(METHODS),
        default=default,
        expose_value=False,
        help="What is trained in few bits: activation functions (fewbit), pre-activation layers (blpa), all layers at"
        " ActNN's levels (actnn), gated MLPs (glu), saved-tensor hooks and levels (hooks). Each has options of its own:"
        " --method blpa --help.  [default:"
        " fewbit]",
    )


def run_study(
    name: str,
    source: Path | None,
    output: Path,
    run: Callable[[], Numbers],
    lines: Callable[[Numbers], list[str]],
    draw: Callable[[Numbers], "Figure"],
) -> None:
    """Run a study or read its numbers, print its table, draw its figure; the numbers go beside the figure.

    Args:
        name: of the command after `fewbit plot`; it stands in the file of numbers.
        source: a file of numbers, to run nothing.
        output: of the figure.
        run: the study.
        lines, draw: table and figure of its numbers.

    Raises:
        FewbitError: a file cannot be read or written, or `source` is of another study.
    """
    from ..plots import check_figure_path, save_figure

    check_figure_path(output)
    results = output.with_suffix(".json")
    if source:
        numbers = _read(name, source)
    else:
        check_writable(results)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see demo.py; read when torch is loaded
        numbers = {"study": name, "versions": _versions(), **run()}
        with atomic_write(results) as stream:
            stream.write(dumps(numbers).encode())
    try:
        text, figure = lines(numbers), draw(numbers)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FewbitError(f"{source or results}: not what `fewbit plot {name}` writes: {error!r}") from None
    save_figure(figure, output)
    click.echo("\n".join(text))
    for written in [output] if source else [results, output]:
        click.echo(f"wrote {written}", err=True)


@contextmanager
def steps_bar(length: int) -> Iterator[Callable[[], object]]:
    """Give what is to be called after each of `length` steps; a bar shows them where a person is watching."""
    with click.progressbar(length=length, label="running", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update(1)


def _read(name: str, source: Path) -> Numbers:
    try:
        numbers = json.loads(source.read_bytes())
    except OSError as error:
        raise FewbitError(f"cannot read {source}: {reason(error)}") from None
    except ValueError:
        numbers = None
    if not isinstance(numbers, dict) or numbers.get("study") != name:
        raise FewbitError(f"{source}: not what `fewbit plot {name}` writes")
    return numbers


def _versions() -> dict[str, str]:
    packages = ("fewbit", "torch", "scikit-learn")
    installed = {name: version(name) for name in packages if find_spec(name.replace("scikit-learn", "sklearn"))}
    return {"python": platform.python_version(), **installed}
