"""`fewbit plot training`: losses of a model trained exactly and with few bits, over several seeds."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import click

from ...cli.figure import refuse_with_input, trained_option
from ...cli.options import bits_list_option, figure_option
from ...tables.columns import columns
from ...tables.names import counted
from ..demo.runs import averaging_window
from ..demo.settings import SETTINGS
from ..intervals import verdict
from ..studies.study import Comparison, Study
from .study import ENDS, Numbers, Save, method_option, run_study, seeds_option, steps_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@click.command("training")
@method_option("fewbit")
@click.option(
    "--model",
    type=click.Choice(list(SETTINGS)),
    default="gpt2",
    show_default=True,
    help="GPT-2 of transformers, from a small configuration, or the small transformer of fewbit demo.",
)
@click.option("--steps", type=int, metavar="N", help="Steps to train.  [default: 300 for gpt2, 700 for small]")
@seeds_option
@bits_list_option
@click.option(
    "--control", is_flag=True, help="Train exactly once more from weights changed by a millionth: the effect of chance."
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads for torch; models this small gain little from more.",
)
@trained_option
@figure_option
@click.pass_context
def command(
    context: click.Context,
    model: str,
    steps: int | None,
    seeds: int,
    bits: tuple[int, ...],
    control: bool,
    threads: int,
    source: Path | None,
    output: Path,
) -> None:
    """Train a model exactly and with few bits, with several seeds, and draw the losses.

    The model predicts the next character of the standard library's source. Runs of one seed share initial weights and
    batches. How a number of bits ends is told by the 95 % interval of its validation losses less exact training's.

    The numbers are written beside the figure as .json after every seed. At the defaults this takes a quarter of an hour
    on one core; --steps 50 takes two minutes.

    Example: fewbit plot training --bits 3,4 -o training.png
    """
    refuse_with_input(context, "trained", "model", "steps", "seeds", "bits", "control", "threads")

    def run(save: Save) -> Numbers:
        return _train(model, steps, seeds, bits, control, threads, save)

    packages = ("transformers",) if model == "gpt2" else ()
    run_study("training", source, output, run, lines_of, figure_of, read=Study.from_dict, packages=packages)


def _train(
    model: str, steps: int | None, seeds: int, bits: tuple[int, ...], control: bool, threads: int, save: Save
) -> Numbers:
    """Train one seed after another and save the results after each."""
    import torch

    from ..demo.data import standard_library
    from ..demo.training import EXACT, MODELS, NUDGED, few_bit, train

    settings = SETTINGS[model] if steps is None else replace(SETTINGS[model], steps=steps)
    torch.set_num_threads(threads)
    variants = [EXACT, *map(few_bit, bits), *([NUDGED] if control else [])]
    corpus, trainings = standard_library(), []
    with steps_bar(seeds * settings.steps, "training") as step:
        for seed in range(seeds):
            trainings.append(train(variants, corpus, replace(settings, seed=seed), MODELS[model], step))
            save(Study(model, tuple(trainings)).to_dict())
    return Study(model, tuple(trainings)).to_dict()


# ---- output ----------------------------------------------------------------------------------------------------------


def figure_of(study: Study) -> "Figure":
    """Return a figure of the losses of all variants."""
    from ..figures.training import Seeds, plot_seeds

    seeds = [
        Seeds(name, study.curves(name), [run.validation_loss for run in study.runs(name)]) for name in study.variants
    ]
    return plot_seeds(seeds, study.trainings[0].unigram_entropy)


def lines_of(study: Study) -> list[str]:
    """Return a table of the variants, followed by a legend of its columns."""
    settings, entropy = study.trainings[0].settings, study.trainings[0].unigram_entropy
    compared = {comparison.variant: _compared(comparison) for comparison in study.comparisons()}
    head = (
        *("activation", "training loss", "validation loss", "less exact", "of each seed"),
        *("95 % interval", "ends", "steps outside", "at most by", "activations keep", "model keeps", "time per step"),
    )
    body = [(name, *_losses(study, name), *compared.get(name, _EXACT), *_costs(study, name)) for name in study.variants]
    return [
        *columns([head, *body], left=1),
        "",
        f"{study.model}: {settings.steps} steps of {settings.batch} windows of {settings.size.context} characters,"
        f" {len(study.trainings)} seeds; the runs of a seed have the same weights and batches.",
        "Losses are in nats a character, means over the seeds; training loss is the mean of the last"
        f" {counted(averaging_window(settings.steps), 'step')}.",
        "Less exact: validation loss less that of the exact run of the same seed.",
        "Steps outside: where the mean training loss is below the lowest or above the highest exact run, and at most by"
        " how much.",
        ENDS,
        f"Unigram entropy: {entropy:.4f}, the loss of who knows only how often each character occurs.",
        "Kept: bytes held from forward to backward in one step. Time: the median.",
    ]


def _losses(study: Study, variant: str) -> tuple[str, str]:
    runs = study.runs(variant)
    return f"{fmean(run.final_loss for run in runs):.4f}", f"{fmean(run.validation_loss for run in runs):.4f}"


_EXACT = ("",) * 6  # not compared


def _compared(comparison: Comparison) -> tuple[str, ...]:
    return (
        f"{comparison.gap.mean:+.4f}",
        " ".join(f"{difference:+.4f}" for difference in comparison.validation_differences),
        f"± {comparison.gap.half:.4f}",
        verdict(comparison.gap),
        f"{comparison.steps_outside} of {len(comparison.outside)}",
        f"{comparison.farthest_outside:.4f}" if comparison.steps_outside else "",
    )


def _costs(study: Study, variant: str) -> tuple[str, str, str]:
    runs = study.runs(variant)
    seconds = median(run.step_seconds for run in runs)
    return f"{runs[0].activation_bytes:,} B", f"{runs[0].saved_bytes:,} B", f"{1000 * seconds:.1f} ms"
