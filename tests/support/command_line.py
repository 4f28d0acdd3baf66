"""Two ways to run the command line: in this process, and as a user does."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from fewbit.cli.main import main


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys):
    """Run `fewbit ARGUMENTS...` in this process."""

    def run(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def command():
    """The words that run `fewbit` as a process of its own."""
    return [sys.executable, "-m", "fewbit"]


@pytest.fixture
def run_process(command):
    """Run `fewbit ARGUMENTS...` as a process of its own."""

    def run_process(*arguments, **options):
        done = subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False, **options
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run_process
