"""`fewbit tables`: the shipped tables."""

from collections.abc import Sequence
from pathlib import Path

import click

from ..tables import Table, load_table
from ..tables.json_format import dumps
from ..tables.shipped import DATA, shipped_activations, shipped_tables
from ..tables.table import table_to_dict
from .lazy import WholeHelpGroup
from .options import FILE, activation_argument, bits_option, json_option, kind_option, weight_option
from .progress import with_progress
from .proofs import provable, replays, require_checker
from .text import list_text, table_text


@click.group("tables", cls=WholeHelpGroup)
def command() -> None:
    """List, show, rebuild and verify the shipped tables.

    Example: fewbit tables show gelu --bits 2
    """


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the shipped tables with their errors.

    Example: fewbit tables list
    """
    tables = [table for activation in shipped_activations() for table in shipped_tables(activation)]
    if as_json:
        click.echo(dumps({"tables": [table_to_dict(table) for table in tables]}), nl=False)
    else:
        click.echo(list_text(tables))


@command.command()
@activation_argument
@bits_option
@kind_option
@weight_option
@json_option
def show(activation: str, bits: int, kind: str, weight: str, as_json: bool) -> None:
    """Show one shipped table.

    Example: fewbit tables show silu --bits 2 --kind interval
    """
    table = load_table(activation, bits, kind, weight=weight)
    click.echo(dumps(table_to_dict(table)) if as_json else table_text(table) + "\n", nl=False)


@command.command()
@click.option("--output", type=FILE, metavar="DIR", default=DATA, help="Folder to write.  [default: fewbit's own]")
def build(output: Path) -> None:
    """Solve the shipped tables again and write them.

    Example: fewbit tables build --output /tmp/tables
    """
    from ..fewbit_gen.build import build as build_files
    from ..fewbit_gen.build import problems

    todo = problems()
    for _ in with_progress(build_files(output, todo), len(todo), "solving"):
        pass
    click.echo(f"wrote {len({problem.activation for problem in todo})} files to {output}", err=True)


@command.command()
@click.option(
    "--input",
    "folder",
    type=FILE,
    metavar="DIR",
    default=DATA,
    help="Folder to verify.  [default: fewbit's own]",
)
@click.option("--bounds", is_flag=True, help="Also recompute the lower bounds, which takes as long as solving.")
@click.option(
    "--proofs",
    is_flag=True,
    help="Also write a proof of each lower bound of 1 to 4 bits and replay it in ball arithmetic (python-flint), by a "
    "checker that shares nothing with the solver. Takes minutes.",
)
def verify(folder: Path, bounds: bool, proofs: bool) -> None:
    """Recompute the error of every shipped table and compare; with --bounds or --proofs, prove each optimal again.

    Example: fewbit tables verify
    """
    from ..fewbit_gen.build import TOLERANCE, table_files
    from ..fewbit_gen.build import verify as verify_files

    if proofs:
        require_checker()
    paths = table_files(folder)
    checks = [c for _, group in with_progress(verify_files(paths, bounds), len(paths), "verifying") for c in group]
    wrong = [check for check in checks if not check.holds]
    for check in wrong:
        said = f"error is {check.error:.17g}, {check.drift:.2g} away; lower bound {check.bound}, {check.gap:.2g} below"
        click.echo(f"{check.source}: {check.table!r}, {said}", err=True)
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(checks)} tables have a wrong error or lower bound")
    gaps: dict[float, float] = {}
    for check in checks:
        gaps[check.largest_gap] = max(check.gap, gaps.get(check.largest_gap, 0.0))
    drift = max(check.drift for check in checks)
    click.echo(
        f"{len(checks)} tables verified: errors within {drift:.2g}, allowed {TOLERANCE:.2g}; "
        f"lower bounds{' again' if bounds else ''} within "
        + ", ".join(f"{gap:.2g} of them, allowed {allowed:.2g}" for allowed, gap in sorted(gaps.items()))
    )
    if proofs:
        _replay([check.table for check in checks])


def _replay(tables: Sequence[Table]) -> None:
    todo = provable(tables)
    done = list(with_progress(replays(todo), len(todo), "proving"))
    refused = [one for one in done if one.refused]
    for one in refused:
        click.echo(f"{one.table!r}: {one.refused}", err=True)
    if refused:
        raise click.ClickException(f"{len(refused)} of {len(done)} tables of 1 to 4 bits are not proven")
    if done:
        gap, size = max(one.gap for one in done), max(one.size for one in done)
        click.echo(
            f"{len(done)} tables of 1 to 4 bits proven in ball arithmetic, to {gap:.2g} of their errors; "
            f"proofs of up to {size / 1e3:.0f} kB, {sum(one.size for one in done) / 1e6:.3g} MB together"
        )
