"""The loss of a frozen head by Liger-Kernel: torch's loss and gradient, and plain torch for all that Liger has not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "liger_loss.py"


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger-Kernel is not installed")
def test_liger_has_the_loss_of_a_frozen_head():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert len(said) == 8 and all(line.endswith("True True") for line in said), done.stdout + done.stderr[-2000:]
