"""Two processes over gloo: each finds its own threshold in its own activations (V-Quant, Section 4.4)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "support" / "parallel_outliers.py"


def test_the_threshold_is_local(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), tmp_path / "meeting"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            said = process.communicate(timeout=120)[0]
            assert said.splitlines() == ["local", "large 20", "gradients agree"], said
    finally:
        for process in processes:
            process.kill()
