"""Two processes that meet over gloo."""

import subprocess
import sys

import pytest
import torch


def said_by_two(script, meeting):
    """Return what each of two processes prints that run `script` with their rank and the file in which they meet."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), meeting], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
