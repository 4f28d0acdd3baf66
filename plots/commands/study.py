"""Shared by the commands that run a study: write its numbers as JSON, print a table and draw a figure."""

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

from ...cli.figure import write_figure
from ...cli.options import FILE
from ...tables import FewbitError
from ...tables.files import check_writable, reason
from ..intervals import MARGIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = dict[str, Any]
Save = Callable[[Numbers], None]

# The legend of a column.
ENDS = (
    "Ends: above or below exact training if the 95 % interval of the differences, paired by seed, leaves out zero and"
    f" reaches beyond ±{MARGIN}; equal if it lies within ±{MARGIN}; else undecided."
)

input_option = click.option(
    "--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE without running anything."
)
seeds_option = click.option(
    "--seeds",
    type=click.IntRange(2, 100),
    metavar="N",
    default=3,
    show_default=True,
    help="Number of seeds, from 0 on.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", default=1, show_default=True, help="Threads for torch."
)

# `fewbit plot training` is one command for all of these (plot_training.py).
METHODS = ("fewbit", "blpa", "actnn", "glu", "hooks")


def method_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option --method of a training command, which runs for the method `default`."""
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
    run: Callable[[Save], Numbers],
    lines: Callable[[Any], list[str]],
    draw: Callable[[Any], "Figure"],
    *,
    read: Callable[[Numbers, str], Any] = lambda numbers, source: numbers,
    packages: tuple[str, ...] = (),
    writers: str = "",
) -> None:
    """Run a study or read its numbers, print its table and draw its figure; write the numbers beside the figure.

    Table and figure use the numbers as written, so that the file reproduces them.

    Args:
        name: of the command after `fewbit plot`; stored in the file of numbers.
        source: a file of numbers to read instead of running the study.
        output: path of the figure.
        run: the study. It may call its argument with the numbers so far to save them before it finishes.
        lines, draw: return the table and the figure of the result of `read`.
        read: converts the numbers, given with their file name for messages; by default returns them unchanged.
        packages: packages whose versions are stored besides those of Python, fewbit and torch.
        writers: commands whose files are accepted as `source`, for messages; only `name` if empty.

    Raises:
        FewbitError: a file cannot be read or written, or `source` belongs to another study.
    """
    from .. import check_figure_path, compact_json

    check_figure_path(output)
    results, writers = output.with_suffix(".json"), writers or f"`fewbit plot {name}`"
    if source:
        numbers = _read(source, name, writers)
    else:
        check_writable(results)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see demo.py; must be set before torch is loaded
        head = {"study": name, "versions": _versions("torch", *packages)}

        def save(found: Numbers) -> None:
            compact_json.write(results, {**head, **found})

        save(run(save))
        numbers = _read(results, name, writers)
    try:
        found = read(numbers, str(source or results))
        text, figure = lines(found), draw(found)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FewbitError(f"{source or results}: not what {writers} writes: {error!r}") from None
    write_figure(figure, output, text, written=[] if source else [results])


@contextmanager
def steps_bar(length: int, label: str = "running") -> Iterator[Callable[[], object]]:
    """Yield a function to call after each of `length` steps; on a terminal it advances a progress bar."""
    with click.progressbar(length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update(1)


def _read(source: Path, name: str, writers: str) -> Numbers:
    try:
        numbers = json.loads(source.read_bytes())
    except OSError as error:
        raise FewbitError(f"cannot read {source}: {reason(error)}") from None
    except (ValueError, RecursionError):
        numbers = None
    # Files of older versions do not name their study.
    if not isinstance(numbers, dict) or numbers.get("study", name) != name:
        raise FewbitError(f"{source}: not what {writers} writes")
    return numbers


def _versions(*packages: str) -> dict[str, str]:
    modules = {"scikit-learn": "sklearn"}
    installed = {each: version(each) for each in ("fewbit", *packages) if find_spec(modules.get(each, each))}
    return {"python": platform.python_version(), **installed}
