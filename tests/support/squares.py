"""An experiment of four cases that takes no time."""

import os

from fewbit.plots.studies.experiment import Experiment
from matplotlib.figure import Figure


def cases():
    return [{"bits": bits, "seed": seed} for seed in (0, 1) for bits in (1, 2)]


def measure(case):
    return {"square": case["bits"] ** 2, "process": os.getpid()}


def lines(rows):
    yield f"{len(rows)} rows"


def draw(rows):
    figure = Figure()
    figure.subplots().plot([row["square"] for row in rows])
    return figure


EXPERIMENT = Experiment("squares", cases, measure, lambda case: 60.0 * case["bits"], lines, draw)
