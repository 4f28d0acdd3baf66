"""`fewbit completion`: the script by which a shell completes commands and options."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_FEWBIT_COMPLETE"  # by which click tells a request for completions


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete commands and options.

    \b
    bash   eval "$(fewbit completion bash)"                               in ~/.bashrc
    zsh    eval "$(fewbit completion zsh)"                                in ~/.zshrc
    fish   fewbit completion fish > ~/.config/fish/completions/fewbit.fish

    Example: fewbit completion bash
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows each of SHELLS"
    click.echo(script(context.find_root().command, {}, "fewbit", _VARIABLE).source())
