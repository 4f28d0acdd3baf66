"""A command group that imports a command only when it runs, so that `fewbit --help` answers at once."""

import difflib
import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """A group whose command `name` is the object `command` in the module `name` of a package.

    Args:
        lazy: the commands in the order of the help page, each with its line there.
        package: where the modules are; a hyphen in a name is an underscore in its module's.
    """

    def __init__(self, *args: Any, lazy: dict[str, str], package: str | None = __package__, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy, self.package = lazy, package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands; imports none."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None if there is none of that name."""
        if cmd_name not in self.lazy:
            return None
        return importlib.import_module(f".{cmd_name.replace('-', '_')}", self.package).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with; a name that is none is told with those that are spelled alike."""
        if args and args[0] not in self.lazy and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.lazy, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(self.lazy)}"
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their lines; imports none."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy.items()))
