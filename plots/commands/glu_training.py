"""`fewbit plot training --method glu`: losses of a Llama trained with its gated MLPs in few bits."""

from dataclasses import replace
from pathlib import Path

import click

from ...cli.figure import trained_option
from ...cli.options import figure_option
from .activation_training import figure_of, lines_of
from .study import Numbers, Save, method_option, run_study, seeds_option, steps_bar, threads_option


@click.command("training")
@method_option("glu")
@click.option("--steps", type=click.IntRange(1), metavar="N", default=300, show_default=True, help="Steps to train.")
@seeds_option
@threads_option
@trained_option
@figure_option
def glu_training(steps: int, seeds: int, threads: int, source: Path | None, output: Path) -> None:
    """Train a small Llama exactly and with its gated MLPs in few bits, and draw the losses.

    It is reported as by `fewbit plot training`: the same text, seeds, batches, and rule for the spread. The variants
    are the default bits, the leanest way, and the default with the input of each block in 4 bits.

    Example: fewbit plot training --method glu -o training-glu.png
    """
    from ..studies.study import Study

    def run(save: Save) -> Numbers:
        return _train(steps, seeds, threads, save)

    # The numbers have the format of `fewbit plot training` with another model; either command draws both.
    run_study("training", source, output, run, lines_of, figure_of, read=Study.from_dict, packages=("transformers",))


def _train(steps: int, seeds: int, threads: int, save: Save) -> Numbers:
    """Train one seed after another and save the results after each."""
    import torch

    from ..demo.data import standard_library
    from ..demo.small_networks import Llama
    from ..demo.training import EXACT, train
    from ..studies import glu
    from ..studies.study import Study

    torch.set_num_threads(threads)
    corpus, variants, trainings = standard_library(), [EXACT, *glu.VARIANTS], []
    with steps_bar(seeds * steps, "training") as step:
        for seed in range(seeds):
            trainings.append(train(variants, corpus, replace(glu.SETTINGS, steps=steps, seed=seed), Llama, step))
            save(Study("llama", tuple(trainings)).to_dict())
    return Study("llama", tuple(trainings)).to_dict()
