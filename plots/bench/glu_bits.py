"""`fewbit bench glu-bits`: the best split of bits among the parts of a gated MLP, by noise and bias of gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import click

from ...cli.progress import with_progress
from ...runtime.quantizers.kinds import QuantizerKind
from ...tables.columns import columns
from ..studies.glu import trained
from ..studies.glu_errors import GradientError, gradient_errors, splits
from .report import Report, bench_command


@bench_command("glu-bits")
@click.option(
    "--bits",
    type=click.IntRange(6, 16),
    multiple=True,
    default=(11,),
    show_default=True,
    help="Sum of the bits of all parts; repeatable.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=100, show_default=True, help="Steps of exact training before measuring."
)
@click.option(
    "--draws",
    type=click.IntRange(2, 1000),
    default=8,
    show_default=True,
    help="Gradients to draw for each measurement.",
)
def command(bits: Sequence[int], steps: int, draws: int) -> Report:
    """Measure how a gated MLP's bits are best divided among its parts.

    Prints noise and bias of the gradient for each division, with copies in groups and rotated, and for the best one of
    the variant that saves least. The model is the small Llama of `fewbit plot training --method glu`, after some steps
    of exact training. Errors are squared norms over all parameters, relative to the exact gradient.

    Example: fewbit bench glu-bits --bits 11
    """
    model, loss = trained(steps)
    found = dict.fromkeys(split for total in bits for split in splits(total))
    found |= dict.fromkeys(split for split in splits(8) if split.keep == "inputs")
    given = [replace(split, quantizer=kind) for split in found for kind in get_args(QuantizerKind)]
    errors = sorted(with_progress(gradient_errors(model, loss, given, draws), len(given), "measuring"), key=_order)
    rows = [
        {"keep": e.split.keep, "code": e.split.code, "up": e.split.up, "second": e.split.second}
        | {"quantizer": e.split.quantizer, "bits": e.split.bits}
        | {"noise": e.noise, "bias": e.bias, "total": e.total}
        for e in errors
    ]
    head = ("keep", "code", "up", "act(gate) or gate", "copies", "bits", "noise", "bias", "together")
    names = ("keep", "code", "up", "second", "quantizer", "bits")
    body = [(*(str(row[name]) for name in names), *_shown(row["noise"], row["bias"])) for row in rows]
    return Report({"steps": steps, "draws": draws, "rows": rows}, list(columns([head, *body], left=1)))


def _order(error: GradientError) -> tuple[bool, float, float]:
    return error.split.keep != "parts", error.split.bits, error.total


def _shown(noise: float, bias: float) -> tuple[str, ...]:
    return tuple(f"{value:.5f}" for value in (noise, bias, noise + bias))
