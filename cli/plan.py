"""`fewbit plan`: the training that fits into a memory at the least error and time."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..tables.files import check_writable
from ..tables.json_format import dumps
from ..tables.waits import phases_of
from .options import (
    FILE,
    ByteSize,
    MemorySize,
    json_option,
    training_options,
)
from .progress import clock, with_clock
from .target import errors_in_one_line, sample_count, to_train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..runtime.plan.document import Plan

FRONTIER = 12  # plans of a figure


@click.command("plan")
@click.option(
    "--memory",
    type=MemorySize(),
    metavar="SIZE",
    help="Most memory at the peak of a step, such as 16GiB; or 50%, of the exact step's peak.",
)
@click.option("--error", type=float, metavar="E", help="Largest relative error of the gradient, such as 0.05.")
@click.option("--time", type=float, metavar="T", help="Longest step relative to the exact one, such as 1.05.")
@click.option(
    "--batch",
    metavar="N",
    help="Samples in a batch, or max: the largest that fits.  [default: 1, or the function's own]",
)
@training_options
@click.option("--gpu", metavar="NAME", help="Estimate times for this GPU, such as a100, h100 or rtx4090.")
@click.option("--compiled", is_flag=True, help='Plan for torch.compile(backend="fewbit").')
@click.option("--host-memory", type=ByteSize(), metavar="SIZE", help="For codes of a compiled step that wait there.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw memory through the step, and error against memory.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the plan as JSON, for fewbit.fit(plan=...).")
@json_option
def command(
    target: str,
    memory: int | str | None,
    error: float | None,
    time: float | None,
    batch: str | None,
    size: int | None,
    dtype: str,
    optimizer: str,
    gpu: str | None,
    meta: bool,
    compiled: bool,
    host_memory: int | None,
    parallel: str | None,
    recompute: bool,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the training of a model that fits into a memory at the least error and time.

    TARGET is a model that `fewbit memory models` lists, or package.module:function or file.py:function. The function
    returns (model, inputs) or (model, inputs, loss): inputs is a tensor, a tuple or a dict of keyword arguments; loss
    takes the model's output, and may be left out if that has a loss. If the function has parameters named batch,
    sequence or size, they receive those options.

    Built-in models, and functions under --meta, take no memory; their errors are estimated from shapes and their times
    from the data sheet of --gpu. All others run a few steps and are measured. Where no plan fits the exit status is 1.

    Example: fewbit plan train.py:setup --memory 16GiB -o plan.json
    """
    for file in (plot, output):
        if file:
            check_writable(file)
    count = None if batch == "max" else sample_count(batch, "a number of samples or max")
    with clock(f"loading {target}"):
        from ..runtime.plan.planner import plan  # before any user code: reports that torch is missing
        from ..runtime.plan.solver import NoPlanError

        subject = to_train(target, size, dtype, meta)
    with errors_in_one_line(target, subject.source):
        model, inputs, loss = subject.make(count)
        with phases_of("fewbit.plan", "planning") as phase:
            try:
                found = with_clock(
                    plan,
                    model,
                    inputs,
                    label=phase,
                    loss=loss,
                    memory=memory,
                    error=error,
                    time=time,
                    optimizer=optimizer,
                    batch="max" if batch == "max" else None,
                    gpu=gpu,
                    compiled=compiled,
                    host_memory=host_memory,
                    parallel=parallel,
                    recompute=recompute,
                    frontier=FRONTIER if plot else 0,
                )
            except NoPlanError as refused:
                raise click.ClickException(str(refused)) from refused  # status 1: the use is right, and nothing fits
    if output:
        found.to_json(output)
    if plot:
        from ..plots.figures.save import save_figure

        save_figure(_figure(found, target), plot)
    click.echo(dumps(asdict(found)) if as_json else str(found), nl=not as_json)


def _figure(found: "Plan", title: str) -> "Figure":
    from ..plots.figures.plan import Memory, Way, plot_plan

    line = found.timeline
    kinds = {"gradients": line.gradients, "saved": line.saved, "workspace": line.workspace}
    exact = [sum(sizes) for sizes in zip(line.exact, line.gradients, line.workspace, strict=True)]
    fixed = found.peak.parameters + found.peak.optimizer
    memory = Memory(fixed, kinds, exact, line.backward, found.limits["memory"], found.exact_peak)
    ways = [Way(point.name, point.memory, point.error) for point in found.frontier]
    return plot_plan(memory, ways, Way("chosen", found.peak.total, found.error), title)
