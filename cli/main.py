"""The `fewbit` command line.

`main` runs one command and turns any error into one line on standard error and an exit status:
0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import errno
import os
import sys
from collections.abc import Sequence

import click

from .. import __version__
from ..tables.errors import FewbitError
from .lazy import LazyGroup

# Exit statuses: the second is click's own, the third a shell's for what SIGINT ended (128 + 2).
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
EXTRA = ("torch",)  # optional dependencies that the compiler alone does not need

# A group without a command shows its help page; before click 8.2 that was the default.
_HelpInstead: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


@click.group(
    cls=LazyGroup,
    lazy={
        "solve": "Solve for the best few-bit table of an activation's derivative.",
        "emit": "Write a table as a C or CUDA header, a Python module or data.",
        "tables": "List, show, rebuild and verify the shipped tables.",
        "plot": "Draw derivatives with their tables, errors against bits, and, in a clone, trainings in few bits.",
        "explore": "Show tables in a browser: f' and its table, error and bound, inputs, source code; solve for any "
        "expression.",
        "calibrate": "Measure the inputs of a model's activations, and solve the best tables for them.",
        "memory": "Show the bytes that training saves for backward, and its peak, exactly and with any method.",
        "plan": "Find the training of a model that fits into a memory at the least error and time.",
        "fits": "Say whether a model's training fits into a memory, and the least that it takes.",
        "doctor": "Say what is installed and what works here, and test every kernel on this machine.",
        "cache": "Show, fill and clear the folder of compiled kernels and solved tables.",
        "completion": "Print the script that lets a shell complete commands and options.",
        "demo": "Solve a table for GELU, draw it, and train a small transformer with it.",
    },
    clone={"bench": ("Measure speed on this machine.", "..plots.bench")},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="fewbit %(version)s")
def fewbit() -> None:
    """Train PyTorch models with few bits saved for the backward pass: what training keeps, plans for a memory, and the
    best few-bit table of any activation's derivative.

    In Python: fewbit.convert(model, level="L2"), and see `fewbit memory --help`.

    Example: fewbit memory gpt2 --level L2
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default the process's own) and return the exit status."""
    try:
        status = fewbit.main(arguments, prog_name="fewbit", standalone_mode=False)
        if sys.stdout:  # None under `>&-`
            sys.stdout.flush()  # while an error such as a full disk or a closed pipe can still be reported
        return status if isinstance(status, int) else 0
    except _HelpInstead as error:
        click.echo(error.format_message(), err=True)
        return WRONG_USE
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _complain(error.format_message().rstrip(".") + hint)
        return WRONG_USE
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except FewbitError as error:
        _complain(str(error))
        return WRONG_USE
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        install = f"pip install {error.name} (build: fewbit doctor)"
        _complain(f"this command needs {error.name}, which is not installed: {install}")
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except OSError as error:
        # A reader that closes the pipe early (`| head`) is not an error.
        if error.errno != errno.EPIPE:
            _complain(f"cannot write the output: {error.strerror or error}")
        # Buffered output cannot be written: redirect the interpreter's final flush to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _complain(message: str) -> None:
    """Write `message` to standard error, joined into one line."""
    click.echo("fewbit: " + " ".join(message.split()), err=True)


if __name__ == "__main__":
    sys.exit(main())
