"""`fewbit plot training --method glu`: does a Llama train as well with its gated MLPs in few bits?"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps, read_json
from .options import FILE, figure_option
from .study import method_option
from .training import figure_of, lines_of, versions_of


@click.command("training")
@method_option("glu")
@click.option("--steps", type=click.IntRange(1), metavar="N", default=300, show_default=True, help="Steps to train.")
@click.option(
    "--seeds", type=click.IntRange(2, 100), metavar="N", default=3, show_default=True, help="How many, from 0 on."
)
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", default=1, show_default=True, help="For torch.")
@click.option("--input", "source", type=FILE, metavar="FILE", help="Draw the results in FILE, and train nothing.")
@figure_option
def glu_training(steps: int, seeds: int, threads: int, source: Path | None, output: Path) -> None:
    """Train a small Llama exactly and with its gated MLPs in few bits, and draw the losses.

    It is told as `fewbit plot training` tells it: the same text, seeds, batches, and rule for the spread. The variants
    are the default bits, the leanest way, and the default with the input of each block in 4 bits.

    Example: fewbit plot training --method glu -o training-glu.png
    """
    from ..plots import check_figure_path, save_figure
    from ..plots.studies.study import Study

    check_figure_path(output)
    results = output.with_suffix(".json")
    if source:
        study = Study.from_dict(read_json(source), os.fspath(source))
    else:
        check_writable(results)
        study = _train(steps, seeds, threads, results)
    save_figure(figure_of(study), output)
    click.echo("\n".join(lines_of(study)))
    for written in [output] if source else [results, output]:
        click.echo(f"wrote {written}", err=True)


def _train(steps: int, seeds: int, threads: int, results: Path):  # noqa: ANN202
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see demo.py; read when torch is loaded
    import torch

    from ..plots.studies import glu
    from ..plots.studies.study import Study
    from ..plots.studies.text import standard_library
    from ..plots.studies.training import EXACT, train

    torch.set_num_threads(threads)
    corpus, versions, trainings = standard_library(), versions_of("transformers"), []
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=seeds * steps, label="training", file=sys.stderr, hidden=hidden) as bar:
        for seed in range(seeds):
            settings = replace(glu.SETTINGS, steps=steps, seed=seed)
            variants = [EXACT, *glu.VARIANTS]
            trainings.append(train(variants, corpus, settings, glu.Llama, after_step=lambda: bar.update(1)))
            with atomic_write(results) as stream:
                stream.write(dumps(Study("llama", tuple(trainings), versions).to_dict()).encode())
    return Study("llama", tuple(trainings), versions)
