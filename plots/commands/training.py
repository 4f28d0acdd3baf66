"""`fewbit plot training`: training losses with few bits. Each method has its own file and options."""

from collections.abc import Mapping
from typing import Any

import click

from .activation_training import command as fewbit
from .actnn_training import command as actnn
from .blpa import training as blpa
from .glu_training import glu_training as glu
from .hooks_training import command as hooks


class ByMethod(click.Command):
    """A command that dispatches on --method, an option that all its commands have.

    Args:
        methods: the commands by method; the first is the default.
    """

    def __init__(self, name: str, methods: Mapping[str, click.Command], **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.methods = methods

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the method's command, which then runs; an unknown method is a usage error."""
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


COMMANDS = (training,)
