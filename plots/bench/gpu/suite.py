"""`make gpu-2`: the tests that need a GPU, and compute-sanitizer over calls of every family of kernels.

What is not there costs its own tests and nothing else: only the files that hold such tests are collected. All
processes share the machine code that one of them has compiled.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .apart import MODULE, Part
from .plugin import VARIABLE

TENTH = 0.1
TOOLS = ("memcheck", "racecheck", "synccheck")
_ROOT = Path(__file__).parents[3]
_NEEDS_GPU = re.compile(r"def test_\w+\([^)]*\bbackend\b|mark\.gpu\b|\bBACKENDS\b")
# Of the whole suite's kernels; the test that does the same for activations is left out.
_PYTEST = ("-m", "pytest", "-c", "tests/pytest.ini", "-p", "fewbit.plots.bench.gpu.plugin", "-s", "-q")
_FAULTS = 12  # lines of the tool's, as many as a record keeps


def parts(sample: float, processes: int, toy: bool) -> list[list[Part]]:
    """Return the stages of the call: a tenth of the tests with the tools beside it, then the rest.

    Args:
        sample: the share of the tests that is run, from 0.1 (the first stage alone) to 1.
        processes: that run tests.
        toy: whether to run a tenth of one file, in one process.
    """
    files = ["tests/gpu/test_glu.py"] if toy else files_of_gpu_tests()
    first = [_tests("tests, a tenth", TENTH, files, 0 if toy else processes)]
    if not toy:
        first += [Part(tool, (*MODULE, "sanitize", tool)) for tool in TOOLS]
    return [first] if sample <= TENTH else [first, [_tests("tests, the rest", -TENTH, files, processes)]]


def files_of_gpu_tests() -> list[str]:
    """Return the files that hold tests for a GPU, by what they say."""
    files = (_ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(_ROOT)) for path in files if _NEEDS_GPU.search(path.read_text()))


def _tests(name: str, share: float, files: Sequence[str], processes: int) -> Part:
    parallel = processes and find_spec("xdist") is not None  # without it pytest refuses -n, and runs no test
    split = ("-n", str(processes), "--dist", "worksteal") if parallel else ()
    skipped = ("-k", "not sanitizer", "--tb", "short", "-m", "gpu")
    caches = {"FEWBIT_TESTS_CACHE": str(Path("build/gpu-cache").absolute())}
    return Part(name, (*_PYTEST, *split, *skipped, *files), environment={VARIABLE: str(share), **caches})


def sanitized(tool: str) -> Iterator[dict[str, Any]]:
    """Yield what a tool of compute-sanitizer finds in calls of every family, on sizes about the edges of tiles."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(program):
        yield {"said": "no compute-sanitizer on this machine"}
        return
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    # cuda-bindings ask for functions that a driver may not have, which the tool takes for errors of the program.
    command = [program, "--tool", tool, *quiet, "--error-exitcode", "9", sys.executable, *MODULE, "check", "sizes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    faults = [line for line in lines if line.startswith("=========")]
    yield {"ok": done.returncode == 0, "status": done.returncode, "said": faults[:_FAULTS], "last": lines[-2:]}
