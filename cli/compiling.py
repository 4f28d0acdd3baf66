"""A notice, once and on a terminal only, that the first call of a compiled function takes seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

LINE = "compiling for the first time, which takes some seconds; `fewbit cache warm` does it ahead"


@contextmanager
def compilation_shown() -> Iterator[None]:
    """Write one line to standard error, if it is a terminal, when Numba compiles a function missing from its cache."""
    if not sys.stderr.isatty():
        yield
        return
    from numba.core import event  # the solvers import numba too, so this costs nothing extra

    class Notice(event.Listener):
        shown = False

        def on_start(self, event: Any) -> None:
            if not self.shown:
                self.shown = True
                click.echo(f"fewbit: {LINE}", err=True)

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Notice()):
        yield
