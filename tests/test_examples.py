"""The commands of docs/integrations.md that train with several processes, run as they are printed."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(
    r"^((?:torchrun|accelerate launch) .*)$", (ROOT / "docs" / "integrations.md").read_text(), re.MULTILINE
)


def test_each_example_has_its_command_in_the_documentation_and_in_itself():
    examples = {path.name: path for path in (ROOT / "examples").glob("*.py")}
    assert {Path(command.split()[-1]).name for command in COMMANDS} == set(examples)
    for command in COMMANDS:
        assert command in (ROOT / command.split()[-1]).read_text()


@pytest.mark.deep
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("/")[-1])
def test_it_trains(command):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    if "fsdp2" in command and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch does not run on the CPU")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # No GPU, and no port that another torchrun on this machine has.
    environment = {**os.environ, "PATH": here, "CUDA_VISIBLE_DEVICES": "", "PET_MASTER_PORT": port}
    run = subprocess.run(
        shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5, run.stdout
    assert "accelerate" not in command or "2 processes" in run.stdout
