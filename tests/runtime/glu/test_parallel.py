"""Two processes over gloo: DDP and FSDP2 of gated MLPs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "support" / "glu_parallel.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What two processes that train together say."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    meeting = tmp_path_factory.mktemp("parallel") / "meeting"
    command = [sys.executable, SCRIPT]
    processes = [
        subprocess.Popen([*command, str(rank), meeting], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


FSDP = pytest.param(
    "fsdp",
    marks=pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch does not run on the CPU"
    ),
)


@pytest.mark.parametrize("kind", ["ddp", FSDP])
def test_gradients_are_those_of_one_process(kind, said):
    for text in said:
        assert f"done {kind}\n" in text, text
