"""`fewbit bench kernels`: every CUDA kernel that fewbit generates, compiled for the GPUs of the day. Needs no GPU."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..fewbit_gen import parse_activation, parse_weight
from ..fewbit_gen.library import find_or_solve
from ..tables import DEFAULT_WEIGHT, KINDS, FewbitError, Table
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from ..tables.names import counted
from .options import FILE, bits_list_option
from .progress import with_progress

if TYPE_CHECKING:
    from ..runtime.backends.cuda.codegen.survey import Compiled


@click.command("kernels")
@click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)
@bits_list_option
@click.option("--dtype", "dtypes", multiple=True, help="float32, float16, bfloat16 or float64; may be repeated.")
@click.option("--arch", "archs", multiple=True, help="sm_80, sm_90, sm_100 or another; may be repeated.")
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compile so many at a time.  [default: the cores]")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write what each kernel takes to FILE as JSON.")
def kernels(
    activations: tuple[str, ...],
    bits: tuple[int, ...],
    dtypes: tuple[str, ...],
    archs: tuple[str, ...],
    jobs: int | None,
    output: Path | None,
) -> None:
    """Compile the CUDA kernels of all activations, of both kinds of table, for all dtypes and GPUs.

    It shows the registers that they take and the bytes that do not fit and spill to memory; the exit status is 1 if
    any do. No GPU is needed, but the CUDA compiler that comes with the extras cuda12 and cuda13.

    Example: fewbit bench kernels gelu --bits 1,2,3,4 --arch sm_90
    """
    from ..runtime.backends.cuda.codegen import survey

    if output:
        check_writable(output)
    unknown = set(dtypes) - set(survey.NUMBERS)
    if unknown:
        raise FewbitError(f"no kernels for the dtype {min(unknown)!r}; there are {', '.join(survey.NUMBERS)}")
    tables = _tables(activations or survey.ACTIVATIONS, bits)
    todo = survey.tasks(tables, dtypes or tuple(survey.NUMBERS), archs or survey.ARCHITECTURES)
    jobs = jobs or os.cpu_count() or 1
    compiled = list(with_progress(survey.survey(todo, jobs), len(todo), "compiling"))
    if output:
        with atomic_write(output) as stream:
            stream.write(dumps({"kernels": [one.to_dict() for one in compiled]}).encode())
    click.echo("\n".join(_lines(compiled)))
    spilling = [one for one in compiled if one.spilled]
    click.echo(f"{counted(sum(len(one.usages) for one in compiled), 'kernel')}, of which spill: {len(spilling)}")
    if output:
        click.echo(f"wrote {output}", err=True)
    if spilling:
        raise click.exceptions.Exit(1)


def _tables(activations: Iterable[str], bits: Iterable[int]) -> list[Table]:
    """Tables of both kinds, each once: ReLU's of 1 bit serves for 8."""
    weight = parse_weight(DEFAULT_WEIGHT)
    found = [
        find_or_solve(parse_activation(activation), b, kind, weight, certify=False)
        for activation in activations
        for b in sorted(bits)
        for kind in KINDS
    ]
    return list({table.key: table for table in found}.values())


def _lines(compiled: list["Compiled"]) -> Iterable[str]:
    """A line for each architecture, dtype and kernel: the most that any table's takes."""
    groups: dict[tuple[str, str, str], list[tuple[Compiled, int]]] = {}
    for one in compiled:
        for i, usage in enumerate(one.usages):
            groups.setdefault((one.arch, one.dtype, usage.kernel), []).append((one, i))
    body = []
    for key, members in groups.items():
        usages = [one.usages[i] for one, i in members]
        body.append(
            (
                *key,
                str(len(usages)),
                f"{min(u.registers for u in usages)}-{max(u.registers for u in usages)}",
                str(max(u.shared for u in usages)),
                str(max(u.spilled + u.stack for u in usages)),
                f"{max(one.ms for one, _ in members):.0f}",
            )
        )
    head = ("GPU", "dtype", "kernel", "tables", "registers", "shared bytes", "spilled bytes", "slowest compile ms")
    return columns([head, *sorted(body)], left=3)
