"""`fewbit calibrate`: the input distributions of a model's activations, the best tables for them, and their gain."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, make_folder
from ..tables.json_format import dumps
from ..tables.names import counted
from ..tables.table import check_bits
from .options import bits_option, json_option, kind_option
from .progress import counted_steps, with_progress
from .target import errors_in_one_line, load_target

if TYPE_CHECKING:
    from ..fewbit_gen.calibration import Calibration, Gain


@click.command("calibrate")
@click.argument("target", required=False)
@click.option(
    "--demo", is_flag=True, help="Calibrate a small transformer trained for a few seconds, instead of TARGET."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    required=True,
    help="Folder for weights/*.npz, tables/*.json and calibration.json.",
)
@bits_option
@kind_option
@click.option("--batches", type=click.IntRange(min=1), metavar="N", help="Number of batches to run.  [default: all]")
@click.option("--pooled", is_flag=True, help="Fit one weight and one table per activation, instead of per module.")
@json_option
def command(
    target: str | None,
    demo: bool,
    output: Path,
    bits: int,
    kind: str,
    batches: int | None,
    pooled: bool,
    as_json: bool,
) -> None:
    """Measure the inputs of a model's activations, and solve the best tables for them.

    TARGET is package.module:function or file.py:function. The function takes no arguments and returns what
    fewbit.calibrate takes: (model, batches), (model, batches, loss) or (model, batches, loss, inputs).

    Each input of an activation counts with the square of the gradient that arrives at its output. Pass a file of
    weights to fewbit solve --weight FILE, and the tables to fewbit.convert(model, tables=...).

    Example: fewbit calibrate train.py:setup -o calibrated --bits 2
    """
    if (target is None) != demo:
        raise click.UsageError("give a TARGET or --demo" + ("" if target is None else ", not both"))
    check_bits(bits)
    if demo:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see demo.py; must be set before torch is loaded
    from ..runtime.calibrate import calibrate  # before any user code: reports that torch is missing

    source = None if target is None else load_target(target)
    make_folder(output)
    with errors_in_one_line(target or "--demo", source):
        model, data, *rest = _trained_transformer() if source is None else _returned(source, target)
        loss, inputs = [*rest, None, None][:2]
        calibration = calibrate(model, _first(batches, data), loss, inputs=inputs, bits=bits, kind=kind)
    if pooled:
        calibration = calibration.by_activation()
    gains = list(with_progress(map(calibration.gain, calibration.names), len(calibration), "solving"))
    content = _write(calibration, gains, output)
    click.echo(content if as_json else "\n".join(_lines(calibration, gains)) + "\n", nl=False)
    written = f"{counted(len(gains), 'weight')}, {counted(len(gains), 'table')}"
    click.echo(f"wrote {written} and calibration.json to {output}", err=True)


def _trained_transformer() -> tuple[Any, ...]:
    from ..plots.demo.calibration import SETTINGS, target

    with counted_steps(SETTINGS.steps, "training") as advance:
        return target(advance, SETTINGS)


def _returned(source: Callable[[], Any], target: str | None) -> tuple[Any, ...]:
    """Return the result of the user's function, checked to be 2 to 4 items."""
    returned = source()
    if isinstance(returned, tuple) and 2 <= len(returned) <= 4:
        return returned
    what = f"{len(returned)} things" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise FewbitError(f"{target} must return (model, batches), with a loss and inputs if need be, and returns {what}")


def _first(most: int | None, batches: Any) -> Any:
    """Return the first `most` batches, with a progress bar; `calibrate` checks values of other types."""
    from torch import Tensor

    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        return batches
    lengths = [n for n in (most, len(batches) if isinstance(batches, Sized) else None) if n is not None]
    return with_progress(islice(batches, most), min(lengths, default=None), "calibrating")


def _write(calibration: "Calibration", gains: "Sequence[Gain]", folder: Path) -> str:
    """Write all files and return the content of calibration.json, which lists the others."""
    from ..fewbit_gen.calibration import file_stem

    weights = calibration.save(folder / "weights")
    make_folder(folder / "tables")
    modules = []
    for gain, weight in zip(gains, weights, strict=True):
        table = folder / "tables" / f"{file_stem(gain.name)}.json"
        calibration.table(gain.name).to_json(table)
        files = {"weight": str(weight.relative_to(folder)), "table": str(table.relative_to(folder))}
        modules.append({**gain.to_dict(), **files})
    content = dumps(
        {
            "bits": calibration.bits,
            "kind": calibration.kind,
            "batches": calibration.batches,
            "modules": modules,
            "silent": list(calibration.silent),
            "skipped": calibration.skipped,
        }
    )
    with atomic_write(folder / "calibration.json") as stream:
        stream.write(content.encode())
    return content


def _lines(calibration: "Calibration", gains: "Sequence[Gain]") -> list[str]:
    """Return the report: a row for each module, one for all together, and a legend of the columns."""
    before = sum(gain.default_error * gain.squared_gradient for gain in gains)
    after = sum(gain.error * gain.squared_gradient for gain in gains)
    head = ("module", "activation", "inputs", "default error", "calibrated", "better by", "share of all")
    body = [
        (
            gain.name or "(model)",
            gain.activation,
            f"{gain.elements:,}",
            _error(gain.default_error),
            _error(gain.error),
            f"{gain.ratio:.2f}",
            f"{100 * gain.default_error * gain.squared_gradient / before:.0f} %" if before else "",
        )
        for gain in gains
    ]
    together = [("all", "", "", "", "", f"{before / after:.2f}", "")] if len(gains) > 1 and after else []
    lines = [
        *columns([head, *body, *together], left=2),
        "",
        f"{counted(calibration.bits, 'bit')}, kind {calibration.kind}; batches: {calibration.batches}.",
        "Error: what a table adds to the gradient, squared, as a share of the squared gradient that comes in.",
        "Share of all: of the squared error that the default tables add at all of these activations.",
        "Inputs change while a model learns: calibrate on one that has learnt for a while, and again if it matters.",
    ]
    if calibration.silent:
        lines.append(f"No gradient reached {', '.join(name or 'the model itself' for name in calibration.silent)}.")
    if calibration.skipped:
        lines.append(f"Left out as they or their gradients were not finite: {calibration.skipped:,} inputs.")
    return lines


def _error(value: float) -> str:
    return f"{value:.3g}" if value else "exact"
