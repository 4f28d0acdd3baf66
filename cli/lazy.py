"""A command group that imports a command only when it runs, which keeps `fewbit --help` fast.

A clone of the repository has more commands than an installed wheel: those that make the evidence. A wheel says so.

add_studies(group, {"blpa": ("gradient-noise", "blpa-memory"), "training": ("training",)})
"""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..tables.errors import FewbitError

IN_A_CLONE = (Path(__file__).parents[1] / "plots" / "commands").is_dir()


def add_studies(group: click.Group, modules: Mapping[str, Sequence[str]]) -> None:
    """Add the commands of modules of `plots.commands`; where those are not there, commands that say what has them.

    Args:
        group: gets the commands.
        modules: the names of each module's commands, which a wheel cannot ask it for.
    """
    for module, names in modules.items():
        if IN_A_CLONE:
            for command in importlib.import_module(f"..plots.commands.{module}", __package__).COMMANDS:
                group.add_command(command)
            continue
        for name in names:
            # Whatever follows the name, --help too, gets the same answer.
            any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
            group.add_command(
                click.Command(name, any_arguments, lambda name=name: _fail_outside_a_clone(name), hidden=True)
            )


def _fail_outside_a_clone(name: str) -> None:
    raise FewbitError(f"{name!r} comes with a clone of the repository, not with an installed wheel")


class WholeHelpGroup(click.Group):
    """A group whose help page has the whole first sentence of each command, where click would cut it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in found if one is not None and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyGroup(click.Group):
    """A group whose command `name` is the object `command` in the module `name` of a package.

    Args:
        lazy: each command's one-line help, in the order of the help page.
        package: the package of the modules; a hyphen in a command name is an underscore in the module name.
        clone: help and module of commands that only a clone of the repository has; the module is relative to `package`.
    """

    def __init__(
        self,
        *args: Any,
        lazy: dict[str, str],
        package: str | None = __package__,
        clone: dict[str, tuple[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.clone, self.package = clone or {}, package
        self.lazy = {**lazy, **{name: help for name, (help, _) in self.clone.items() if IN_A_CLONE}}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands without importing any."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None if the name is unknown."""
        if cmd_name not in self.lazy:
            return None
        _, module = self.clone.get(cmd_name, ("", f".{cmd_name.replace('-', '_')}"))
        return importlib.import_module(module, self.package).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with; the error for an unknown name lists similar names."""
        if args and args[0] not in self.lazy and not args[0].startswith("-") and not ctx.resilient_parsing:
            if args[0] in self.clone:
                _fail_outside_a_clone(args[0])
            near = difflib.get_close_matches(args[0], self.lazy, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(self.lazy)}"
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their one-line helps, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions of a command's name or an option, without importing any command."""
        names = [CompletionItem(name, help=help) for name, help in self.lazy.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]
