"""The C library's allocator: what is freed goes back to the system, whatever lives beside it."""

import platform
import subprocess
import sys

import pytest

# Prints how far resident memory rises when 50 tensors of 2 MiB are freed and the 4 KiB that follow each stay.
SCRIPT = """
from pathlib import Path
import torch
from fewbit import memory

def resident():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

if {returned}:
    memory.return_freed_memory()
torch.ones(1 << 22)  # freed: from now on glibc, left alone, serves blocks of up to 16 MiB from its heap
before, tensors, codes = resident(), [], []
for _ in range(50):
    tensors.append(torch.ones(1 << 19))
    codes.append(torch.ones(1 << 10))
tensors.clear()
print(resident() - before)
"""


def _held(returned: bool) -> int:
    script = SCRIPT.format(returned=returned)
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


@pytest.mark.deep
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is glibc's")
def test_small_codes_hold_no_gaps_of_freed_tensors():
    assert _held(returned=True) < 8 << 20
    # Left alone, glibc holds 100 MiB in two runs of three: in the others, 4 to 36, by where its heap lies.
    assert any(_held(returned=False) > 50 << 20 for _ in range(8))
