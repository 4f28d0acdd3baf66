"""`fewbit memory paper`: Appendix B of "Few-bit Backward" beside what is measured here."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.options import FILE, json_option
from ...cli.progress import with_progress
from ...tables.columns import columns
from ...tables.files import atomic_write, check_writable
from ...tables.json_format import dumps

if TYPE_CHECKING:
    from ..studies.appendix_b import Reproduced, Row


@click.command("paper")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the rows to FILE as JSON.")
@json_option
def paper(output: Path | None, as_json: bool) -> None:
    """Reproduce the paper's Appendix B.

    Measures the models of "Few-bit Backward" that `transformers` can build and prints the paper's rows beside: sizes in
    MiB, activations per sample, largest batches in 32 GiB. The settings are those that reproduce the paper's numbers:
    256 tokens or 256x256 pixels, float32, no dropout, attention scores in memory, GELU instead of ResNet's ReLU.

    Example: fewbit memory paper -o appendix-b.json
    """
    if output:
        check_writable(output)
    from ..studies import appendix_b

    rows = [appendix_b.reproduce(name) for name in with_progress(appendix_b.PAPER, len(appendix_b.PAPER), "measuring")]
    content = dumps({"unit": "MiB", "memory": appendix_b.GPU_MEMORY, "rows": [row.to_dict() for row in rows]})
    if output:
        with atomic_write(output) as stream:
            stream.write(content.encode())
    click.echo(content if as_json else "\n".join(_paper_lines(rows)) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


COMMANDS = (paper,)


def _paper_lines(rows: "list[Reproduced]") -> list[str]:
    """Return two lines for each model: the paper's numbers and the measured ones."""
    head = ("model", "", "model MiB", "kept MiB", "nonlinear MiB", "batch", "1 bit", "2 bits", "3 bits", "4 bits")
    body = [
        line
        for row in rows
        for line in (_paper_line(row.name, "paper", row.paper), _paper_line("", "measured", row.measured))
    ]
    return list(columns([head, *body], left=2))


def _paper_line(name: str, which: str, row: "Row") -> tuple[str, ...]:
    exact, *few = row.batches
    sizes = (f"{size:.1f}" for size in (row.model, row.activations, row.nonlinear))
    return (name, which, *sizes, str(exact), *(f"{batch} ({batch / exact - 1:+.1%})" for batch in few))
