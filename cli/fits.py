"""`fewbit fits`: whether a training fits into a memory; the exit status says it, too."""

from dataclasses import asdict

import click

from ..tables.json_format import dumps
from .options import (
    MemorySize,
    json_option,
    training_options,
)
from .progress import clock
from .target import errors_in_one_line, sample_count, to_train


@click.command("fits")
@click.option(
    "--memory",
    type=MemorySize(),
    metavar="SIZE",
    required=True,
    help="Of the device, such as 24GiB; or 50%, of the exact step's peak.",
)
@click.option("--batch", metavar="N", help="Samples in a batch.  [default: 1, or the function's own]")
@training_options
@json_option
@click.pass_context
def command(
    context: click.Context,
    target: str,
    memory: int | str,
    batch: str | None,
    size: int | None,
    dtype: str,
    optimizer: str,
    meta: bool,
    parallel: str | None,
    recompute: bool,
    as_json: bool,
) -> None:
    """Say whether a model's training fits into a memory, and the least that it takes.

    TARGET is as for `fewbit plan`. Any plan of an eager step counts: codes, recomputed blocks, the loss in chunks, and
    what they take at the peak; a compiled step may take less (`fewbit plan --compiled`). The step is traced without
    values, so no memory is taken but that of the model as the function returns it. Exit status 0: it fits; 1: it does
    not.

    Example: fewbit fits train.py:setup --memory 24GiB
    """
    count = sample_count(batch)
    with clock(f"loading {target}"):
        from ..runtime.plan.fits import fits  # before any user code: reports that torch is missing

        subject = to_train(target, size, dtype, meta)
    with errors_in_one_line(target, subject.source):
        model, inputs, loss = subject.make(count)
        found = fits(
            model,
            inputs,
            memory=memory,
            loss=loss,
            optimizer=optimizer,
            recompute=recompute,
            parallel=parallel,
        )
    click.echo(dumps({"fits": bool(found), **asdict(found)}) if as_json else str(found), nl=not as_json)
    context.exit(0 if found else 1)
