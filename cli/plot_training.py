"""`fewbit plot training`: does a network train as well with few bits? Each method has a file with its own options."""

from collections.abc import Mapping
from typing import Any

import click

from .actnn_training import command as actnn
from .hooks_training import command as hooks
from .plot_blpa import training as blpa
from .plot_glu import glu_training as glu
from .training import command as fewbit


class ByMethod(click.Command):
    """A command that is another one for each value of --method, an option that all of them have.

    Args:
        methods: the commands; the first is that without --method.
    """

    def __init__(self, name: str, methods: Mapping[str, click.Command], **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.methods = methods

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the method's command, which then runs, or tells that there is no such method."""
        given = [*args, ""]
        chosen = [given[i + 1] for i, argument in enumerate(args) if argument == "--method"]
        chosen += [argument.removeprefix("--method=") for argument in args if argument.startswith("--method=")]
        default, *_ = self.methods.values()
        return self.methods.get("".join(chosen[-1:]), default).make_context(info_name, args, parent, **extra)


training = ByMethod(
    "training",
    {"fewbit": fewbit, "blpa": blpa, "actnn": actnn, "glu": glu, "hooks": hooks},
    help="Train networks exactly and with few bits, with several seeds, and draw the losses.",
)
