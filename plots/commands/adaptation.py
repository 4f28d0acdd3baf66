"""`fewbit plot adaptation`: errors of tables that follow a training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.figure import refuse_with_input
from ...cli.options import FILE, BitsList, figure_option
from ...tables.columns import columns
from .study import Numbers, Save, run_study, steps_bar

if TYPE_CHECKING:
    from ..figures.adaptation import Followed


@click.command("adaptation")
@click.option("--model", "models", multiple=True, type=click.Choice(["small", "gpt2"]), help="Default: both.")
@click.option("--bits", type=BitsList(), default="1,2,3", show_default=True, metavar="N,...", help="Each 1 to 8.")
@click.option(
    "--adapt", type=click.IntRange(2), default=200, show_default=True, metavar="N", help="Steps between exchanges."
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps to train.  [default: the model's]")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of seeds, from 0 on.",
)
@click.option("--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE without training.")
@figure_option
@click.pass_context
def adaptation(
    context: click.Context,
    models: tuple[str, ...],
    bits: tuple[int, ...],
    adapt: int,
    steps: int | None,
    seeds: int,
    source: Path | None,
    output: Path,
) -> None:
    """Measure and draw the errors of tables that follow a training, as convert(adapt=N) solves them.

    A small transformer and a GPT-2 learn Python's standard library with tables that follow, with default tables, and
    exactly. Every 100 steps the error of each activation's table under its inputs is taken of the default table, of
    the one for the inputs before the first step, and of the one in use. The numbers, with the losses at the end, are
    written beside the figure as .json.

    Example: fewbit plot adaptation -o adaptation.png
    """
    from ..figures.adaptation import plot_adaptation

    refuse_with_input(context, "trained", "model", "bits", "adapt", "steps", "seeds")

    def run(save: Save) -> Numbers:
        return _train(models or ("small", "gpt2"), bits, adapt, steps, range(seeds), save)

    run_study("adaptation", source, output, run, _lines, plot_adaptation, read=_runs)


def _train(
    models: Sequence[str], bits: Sequence[int], adapt: int, steps: int | None, seeds: Sequence[int], save: Save
) -> Numbers:
    import torch

    from ..demo.data import standard_library
    from ..demo.settings import SETTINGS
    from ..studies.adaptation import follow

    torch.set_num_threads(1)
    corpus, found = standard_library(), []
    todo = [(seed, model, b) for seed in seeds for model in models for b in bits]
    with steps_bar(sum(steps or SETTINGS[model].steps for _, model, _ in todo), "training") as after_step:
        for seed, model, b in todo:
            found.append(follow(model, b, corpus, adapt, seed, steps, after_step=after_step).to_dict())
            save({"runs": found})
    return {"runs": found}


def _runs(numbers: Numbers, _: str) -> "list[Followed]":
    from ..figures.adaptation import Followed

    return [Followed.from_dict(run) for run in numbers["runs"]]


def _lines(runs: "Sequence[Followed]") -> list[str]:
    head = ("model", "bits", "seed", "once", "following", "worst", "best", "loss: exact", "default", "following")
    body = []
    for run in runs:
        errors = (run.ratio("once"), run.ratio("following"), run.worst, run.ratio("best"))
        losses = [run.losses[name] for name in ("exact", "default", "following")]
        numbers = [*(f"{error:.2f}" for error in errors), *(f"{loss:.4f}" for loss in losses)]
        body.append((run.model, str(run.bits), str(run.seed), *numbers))
    return [*columns([head, *body], left=1), "", "Errors relative to the default table's, means after step 0."]


COMMANDS = (adaptation,)
