"""Commands that a clone of the repository has and an installed wheel has not: they make the evidence.

for command in study_commands("training", "variance"):
    group.add_command(command)
"""

import importlib
from pathlib import Path

import click

_PACKAGE = Path(__file__).parents[1]
IN_A_CLONE = (_PACKAGE / "plots" / "commands").is_dir()


def study_commands(*modules: str) -> list[click.Command]:
    """Return the commands in modules of `plots.commands`; none where it is not there."""
    found = [importlib.import_module(f"..plots.commands.{name}", __package__) for name in modules if IN_A_CLONE]
    return [command for module in found for command in module.COMMANDS]
