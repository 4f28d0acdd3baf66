"""`fewbit explore`: the explorer of tables, in a browser."""

import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from .options import FILE


@click.command("explore")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Port to listen on.  [default: a free one]",
)
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FOLDER",
    help="Write the page, without a solver, to FOLDER, and serve nothing.",
)
def command(port: int, no_browser: bool, output: Path | None) -> None:
    """Show tables in a browser: f' and its table, error and bound, inputs, source code; solve for any expression.

    The page is served on the loopback address, for this machine alone, until the command is interrupted. With -o it is
    written as files for any web server, or to be opened from disk: the shipped tables alone.

    Example: fewbit explore
    """
    if output:
        from ..pages.explorer_site import write_site

        write_site(output)
        click.echo(f"wrote {output / 'index.html'}", err=True)
        return
    from ..pages.server import ExplorerServer
    from ..pages.solver_process import SolverProcess

    with SolverProcess() as solver, ExplorerServer(port, solver) as server:
        click.echo(f"{server.url}  (Ctrl-C ends it)")
        if not no_browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):  # the usual end
            server.serve_forever()
