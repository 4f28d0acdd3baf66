"""`fewbit plot training --method actnn`: loss, memory and time of training at ActNN's levels, by seed."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click

from ...cli.figure import trained_option
from ...cli.options import figure_option
from ...tables.columns import columns
from ..intervals import interval, verdict
from ..studies.actnn_runs import Evidence
from .study import ENDS, Numbers, Save, method_option, run_study, seeds_option, steps_bar, threads_option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_BITS = (1.5, 2, 4)


@click.command("training")
@method_option("actnn")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps of each run.  [default: the task's own]")
@seeds_option
@click.option(
    "--task",
    type=click.Choice(["resnet", "transformer", "both"]),
    default="both",
    show_default=True,
    help="A ResNet on scikit-learn's digits, a transformer on Python's source.",
)
@threads_option
@trained_option
@figure_option
def command(steps: int | None, seeds: int, task: str, threads: int, source: Path | None, output: Path) -> None:
    """Train a ResNet and a transformer exactly and at ActNN's levels, and draw losses and memory.

    Compares exact training, 4 bits for all layers (L2), mixed precision at 2 and 1.5 bits (L3), each of these also
    under AMP, and layers at 4 bits with GELU at 2 bits by a few-bit table or as ActNN does it. Runs of one seed share
    initial weights and batches. The numbers are written beside the figure as .json after every seed. This takes about
    ten minutes on one core.

    Example: fewbit plot training --method actnn -o actnn-training.png
    """
    names = ["resnet", "transformer"] if task == "both" else [task]

    def run(save: Save) -> Numbers:
        return _train(names, steps, seeds, threads, save)

    run_study("training --method actnn", source, output, run, _lines, _figure, read=Evidence.from_dict)


def _train(names: list[str], steps: int | None, seeds: int, threads: int, save: Save) -> Numbers:
    """Train one seed after another and save the results after each."""
    import torch

    from ..studies.actnn import TASKS, VARIANTS, block_ratio, train

    torch.set_num_threads(threads)
    ratios = {f"{bits:g}": block_ratio(bits) for bits in BLOCK_BITS}
    tasks = [TASKS[name]() for name in names]
    lengths = [steps or task.steps for task in tasks]
    runs = []
    with steps_bar(seeds * sum(lengths), "training") as step:
        for seed in range(seeds):
            for task, length in zip(tasks, lengths, strict=True):
                runs += train(task, VARIANTS, seed, length, step)
            save(Evidence(tuple(runs), ratios).to_dict())
    return Evidence(tuple(runs), ratios).to_dict()


# ---- output ----------------------------------------------------------------------------------------------------------


def _figure(evidence: Evidence) -> "Figure":
    from ..figures.actnn_training import Variant, plot_actnn_training

    return plot_actnn_training(
        {
            task: [
                Variant(
                    *(name, evidence.curves(task, name), [run.validation_loss for run in evidence.of(task, name)]),
                    evidence.of(task, name)[0].saved_bytes,
                )
                for name in evidence.variants(task)
            ]
            for task in evidence.tasks
        }
    )


def _lines(evidence: Evidence) -> list[str]:
    """Return a table of the variants for each task, followed by a legend of its columns."""
    head = (
        *("", "training loss", "validation loss", "less exact", "of each seed", "95 % interval", "ends", "accuracy"),
        *("model keeps", "times less", "time per step"),
    )
    lines: list[str] = []
    for task in evidence.tasks:
        body = [_row(evidence, task, name) for name in evidence.variants(task)]
        first = evidence.of(task, evidence.variants(task)[0])
        lines += [
            f"{task}: {len(first[0].losses)} steps, {len(first)} seeds",
            *columns([head, *body], left=1),
            "",
        ]
    blocks = ", ".join(f"{ratio:.2f} times at {bits} bits" for bits, ratio in evidence.block_ratios.items())
    return [
        *lines,
        "Means over the seeds; the runs of a seed have the same weights and batches. Training loss: the mean of the"
        " last tenth of the steps.",
        f"Less exact: validation loss less that of the exact run of the same seed. {ENDS}",
        "Kept: bytes held from forward to backward in one step, the loss aside. Time: the median.",
        f"Conv-BN-ReLU keeps less by {blocks}.",
    ]


def _row(evidence: Evidence, task: str, variant: str) -> tuple[str, ...]:
    runs, exact = evidence.of(task, variant), variant == evidence.variants(task)[0]
    differences = evidence.differences(task, variant)
    compared = ("", "", "", "")
    if not exact:
        gap = interval(differences)
        compared = (f"{gap.mean:+.4f}", " ".join(f"{d:+.4f}" for d in differences), f"± {gap.half:.4f}", verdict(gap))
    return (
        variant,
        f"{fmean(curve[-1] for curve in evidence.curves(task, variant)):.4f}",
        f"{fmean(run.validation_loss for run in runs):.4f}",
        *compared,
        f"{100 * fmean(run.accuracy for run in runs):.1f} %",
        f"{runs[0].saved_bytes:,} B",
        "" if exact else f"{evidence.ratio(task, variant):.1f}",
        f"{1000 * evidence.step_seconds(task, variant):.1f} ms",
    )
