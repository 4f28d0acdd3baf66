"""`fewbit bench glu`: what a gated MLP keeps and takes by fewbit, in eager torch, checkpointed and compiled."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from .options import FILE, json_option

if TYPE_CHECKING:
    from ..runtime.glu.bench import Case, Row

_SIZE = click.IntRange(1, 2**24)
_MET = {None: "", True: "yes", False: "no"}


@click.command("glu")
@click.option("--tokens", type=_SIZE, metavar="N", default=1024, show_default=True, help="In a batch.")
@click.option("--hidden", type=_SIZE, metavar="N", default=1024, show_default=True, help="Features of a token.")
@click.option("--intermediate", type=_SIZE, metavar="N", default=2816, show_default=True, help="Features inside.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where.")
@click.option("--rounds", type=click.IntRange(1, 10_000), metavar="N", default=7, show_default=True, help="Timings.")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="For torch.  [default: torch's]")
@click.option("--compiled", is_flag=True, help="Measure torch.compile too.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the numbers to FILE as JSON.")
@json_option
def glu(
    tokens: int,
    hidden: int,
    intermediate: int,
    dtype: str,
    device: str,
    rounds: int,
    threads: int | None,
    compiled: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure a training step of Llama's MLP: bytes kept, and time beside eager torch in the same rounds.

    Liger-Kernel, Unsloth and NeMo stand there by what their kernels keep. The bars of the GPU hold from
    tokens x intermediate of 2^26 on.

    Example: fewbit bench glu --device cuda --dtype bfloat16 --tokens 8192 --hidden 4096 --intermediate 14336
    """
    import torch

    from ..runtime.glu.bench import Case, measure

    if output:
        check_writable(output)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: this torch sees no GPU")
    if threads:
        torch.set_num_threads(threads)
    case = Case(tokens, hidden, intermediate, getattr(torch, dtype), device)
    rows = measure(case, rounds, compiled)
    content = dumps(report_of(case, rows))
    if output:
        with atomic_write(output) as stream:
            stream.write(content.encode())
    click.echo(content if as_json else "\n".join(lines_of(case, rows)) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


def report_of(case: "Case", rows: Sequence["Row"]) -> dict[str, Any]:
    """Return the measurement for JSON."""
    import torch

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
        "dtype": str(case.dtype).removeprefix("torch."),
        **{name: getattr(case, name) for name in ("tokens", "hidden", "intermediate")},
        "rows": [row.to_dict() for row in rows],
    }


def lines_of(case: "Case", rows: Sequence["Row"]) -> list[str]:
    """Return a table of the methods and what its columns mean."""
    head = ("method", "kept per token", "units", "bar", "ms", "ratio", "bar", "met")
    body = [
        (
            row.method,
            f"{row.bytes_per_token:,.0f} B",
            f"{row.units:.3f}",
            *("" if value is None else f"{value:.{digits}f}" for value, digits in _numbers(row)),
            _MET[row.met],
        )
        for row in rows
    ]
    dtype = str(case.dtype).removeprefix("torch.")
    return [
        f"{case.tokens} tokens, hidden {case.hidden}, intermediate {case.intermediate}, {dtype}, {case.device}",
        *columns([head, *body], left=1),
        "",
        "Kept with x; units without it, in tensors of tokens x intermediate. Ratio: to eager, median over rounds.",
    ]


def _numbers(row: "Row") -> tuple[tuple[float | None, int], ...]:
    return (row.bars[0], 2), (row.ms, 1), (row.ratio, 3), (row.bars[1], 2)
