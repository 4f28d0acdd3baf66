"""`fewbit demo`: a tour of fewbit that solves a table, draws it and trains with it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..plots.demo.settings import Settings
from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import make_folder
from .figure import refuse_with_input, trained_option
from .options import BitsList
from .plot import approximation
from .progress import counted_steps
from .solve import command as solve

if TYPE_CHECKING:
    from ..plots.demo.runs import Training


STEPS = 400
OTHER_WEIGHTS = 3  # exact runs from other weights, the baseline for the few-bit runs


@click.command("demo")
@click.option("--steps", type=int, metavar="N", default=STEPS, show_default=True, help="Steps to train.")
@click.option(
    "--seed", type=int, metavar="N", default=Settings.seed, show_default=True, help="Seed of the weights and batches."
)
@click.option(
    "--bits",
    type=BitsList(),
    metavar="N,...",
    default="1,2,3",
    show_default=True,
    help="Bits per element to train with, each 1 to 8.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default="demo-output",
    show_default=True,
    help="Folder for the table, the figures and the numbers.",
)
@trained_option
@click.pass_context
def command(
    context: click.Context, steps: int, seed: int, bits: tuple[int, ...], output: Path, source: Path | None
) -> None:
    """Solve a table for GELU, draw it, and train a small transformer with it.

    The transformer predicts the next character of the standard library's source: once with torch's own GELU and once
    at each number of --bits, from the same initial weights on the same batches. Three exact runs from other weights
    show the effect of chance.

    Example: fewbit demo --bits 1,2,3,4 --output demo-output
    """
    from ..plots import compact_json

    refuse_with_input(context, "trained", "steps", "seed", "bits")
    settings = Settings(steps=steps, seed=seed)
    trained = _read(source) if source else None
    make_folder(output)
    if trained:
        _draw(trained, output / "training.png")
        click.echo("\n".join(_lines(trained)))
        return
    context.invoke(solve, activation="gelu", bits=3, output=output / "gelu.json")
    context.invoke(approximation, activations=("gelu",), bits=bits, output=output / "gelu.png")
    training = _train(bits, settings)
    _draw(training, output / "training.png")
    compact_json.write(output / "training.json", training.to_dict())
    click.echo(f"wrote {output / 'training.json'}", err=True)
    click.echo("\n" + "\n".join(_lines(training)))


def _train(bits: tuple[int, ...], settings: Settings) -> "Training":
    # GNU OpenMP, used by torch, keeps waiting threads spinning on their core. If another program wants that core, a
    # step takes a second instead of 20 ms; if none does, waiting for a shorter time has no measurable cost.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from ..plots.demo.data import standard_library
    from ..plots.demo.training import EXACT, few_bit, other_weights, train

    others = (settings.seed + i if settings.seed < 2**62 else settings.seed - i for i in range(1, OTHER_WEIGHTS + 1))
    variants = [EXACT, *map(few_bit, bits), *map(other_weights, others)]
    with counted_steps(settings.steps, "training") as advance:
        return train(variants, standard_library(), settings, after_step=advance)


def _read(source: Path) -> "Training":
    from ..plots.demo.runs import Training

    try:
        return Training.from_dict(json.loads(source.read_text()))
    except (OSError, KeyError, TypeError, ValueError):
        raise FewbitError(f"{source}: not what `fewbit demo` writes") from None


def _draw(training: "Training", path: Path) -> None:
    from ..plots import save_figure
    from ..plots.demo.runs import smoothed
    from ..plots.figures.training import Curve, plot_training

    window = max(1, training.settings.steps // 25)
    curves = [Curve(run.variant, smoothed(run.losses, window)) for run in training.runs]
    exact = [curve.losses for curve in curves if curve.name.startswith("exact")]
    few = [curve for curve in curves if not curve.name.startswith("exact")]
    save_figure(plot_training(exact, few, training.unigram_entropy), path)
    click.echo(f"wrote {path}", err=True)


def _lines(training: "Training") -> list[str]:
    """Return the table of the runs, followed by a legend of its columns."""
    from ..plots.demo.runs import averaging_window

    settings = training.settings
    exact = [run.validation_loss for run in training.runs if run.variant.startswith("exact")]
    head = ("GELU", "training loss", "validation loss", "GELU keeps", "model keeps", "time per step")
    body = [
        (
            run.variant,
            f"{run.final_loss:.4f}",
            f"{run.validation_loss:.4f}",
            f"{run.activation_bytes:,} B",
            f"{run.saved_bytes:,} B",
            f"{1000 * run.step_seconds:.1f} ms",
        )
        for run in training.runs
    ]
    return [
        *columns([head, *body], left=1),
        "",
        f"{settings.steps} steps of {settings.batch} windows of {settings.size.context} characters, seed"
        f" {settings.seed}: all on the same batches, in turn, and from the same weights but for the last"
        f" {OTHER_WEIGHTS}.",
        f"Losses are in nats a character, for training the mean of the last {averaging_window(settings.steps)} steps.",
        f"Unigram entropy: {training.unigram_entropy:.4f}, the loss of who knows only how often each character occurs.",
        f"Chance: validation losses of the exact runs are {min(exact):.4f} to {max(exact):.4f}.",
        "Kept: bytes held from forward to backward in one step. Time: the median.",
    ]
