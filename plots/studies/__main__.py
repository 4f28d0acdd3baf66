"""`python -m fewbit.plots.studies`: list the experiments, say how long what is missing takes, and measure it.

python -m fewbit.plots.studies                    all that is missing in plots/results
python -m fewbit.plots.studies curves --list      what is missing of one, and how long it takes
python -m fewbit.plots.studies --stale            files of results whose code changed since they were measured
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..numbers.stale import stale
from .experiment import Experiment, run

# Modules of this package that have an EXPERIMENT, in the order in which they are run.
EXPERIMENTS = (
    "curves",
    "finetuning",
    "accuracy",
    "depth",
    "vquant_rescue",
    "deciding",
    "naive",
    "largest",
    "counts",
    "two_bits",
    "two_bits_elsewhere",
    "ten_million",
    "two_bits_seeds",
)
RESULTS = Path(__file__).resolve().parents[1] / "results"


def experiment_of(name: str) -> Experiment:
    """Return the experiment of a module of this package."""
    return importlib.import_module(f"{__package__}.{name}").EXPERIMENT


def minutes(experiment: Experiment, folder: Path, workers: int) -> float:
    """Return how long what is missing takes, about."""
    seconds = sum(map(experiment.seconds, experiment.missing(folder)))
    return seconds / 60 / min(workers, experiment.workers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Say how long what is missing takes, measure it, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m fewbit.plots.studies", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--list", action="store_true", help="only say what is missing")
    parser.add_argument("--stale", action="store_true", help="only say which files were measured by other code")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread at once; default: 2")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args(arguments)
    if chosen.stale:
        for file in stale():
            more = f" and {len(file.changed) - 3} more" if len(file.changed) > 3 else ""
            print(f"{file.name:34} {file.commit}  {', '.join(file.changed[:3])}{more}", flush=True)
        return
    unknown = [name for name in chosen.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}")
    experiments = [experiment_of(name) for name in chosen.names or EXPERIMENTS]
    for experiment in experiments:
        done, missing = len(experiment.rows(chosen.output)), len(experiment.missing(chosen.output))
        left = minutes(experiment, chosen.output, chosen.workers)
        print(f"{experiment.name:14} {done:4} of {done + missing:4} cases measured, {left:4.0f} minutes left")
    if chosen.list:
        return
    for experiment in experiments:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(experiment.name, total=len(experiment.missing(chosen.output)))
            rows = run(experiment, chosen.output, chosen.workers, lambda task=task: progress.advance(task))
        print(*experiment.lines(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
