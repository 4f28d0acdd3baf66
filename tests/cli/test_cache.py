import os
import subprocess
import sys
from importlib.metadata import version

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    return tmp_path


def fill(folder):
    for name in ("kernels/a.cubin", "kernels/b.cubin", "tables/c.json", "kernels/mine.txt", "notes.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(2**19))


def test_info_counts_what_fewbit_wrote(run, folder):
    assert run("cache", "info").out == f"{folder}: 0 files, 0.0 MiB\n"
    fill(folder)
    assert run("cache", "info").out == f"{folder}: 3 files, 1.5 MiB\n"


def test_clear_deletes_what_fewbit_wrote_and_nothing_else(run, folder):
    fill(folder)
    outcome = run("cache", "clear")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", f"{folder}: 3 files deleted\n")
    assert sorted(os.listdir(folder)) == ["kernels", "notes.json", "tables"]
    assert os.listdir(folder / "kernels") == ["mine.txt"]


def test_a_folder_that_cannot_be_is_told_in_one_line(run, folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("FEWBIT_CACHE", str(folder / "file"))
    for command in ("info", "clear"):
        outcome = run("cache", command)
        assert outcome.status == 2
        assert outcome.err.startswith("fewbit: cannot make the folder ") and outcome.err.count("\n") == 1


@pytest.mark.slow
def test_warm_leaves_nothing_to_compile(run_process, tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    outcome = run_process("cache", "warm", env=environment)
    assert (outcome.status, outcome.out) == (0, "")
    assert outcome.err.startswith("compiled, or found compiled, in ")
    code = (
        "import sys; from numba.core import event\n"
        "with event.install_recorder('numba:compile') as seen:\n"
        "    import fewbit\n"
        "    for kind in ('shared', 'interval'): fewbit.solve('silu', bits=3, kind=kind)\n"
        "sys.exit(len(seen.buffer))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def torch_before_2_9():
    return tuple(map(int, version("torch").split(".")[:2])) < (2, 9)


COMPILED = """
import sys, torch
from numba.core import event
from fewbit.runtime.compile.preview import preview
from torch import nn
with event.install_recorder("numba:compile") as seen:
    for options in ({}, {"bits": 2, "rounding": "nearest"}):
        frozen = nn.Linear(256, 64).requires_grad_(False)
        preview(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.GELU(), frozen), torch.randn(64, 64), **options)
sys.exit(len(seen.buffer))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch_before_2_9(), reason="the compile backend needs torch 2.9")
def test_warm_all_leaves_compiled_training_nothing_either(run_process):
    """In the cache of the kernels that other tests compile."""
    outcome = run_process("cache", "warm", "--all")
    assert (outcome.status, outcome.out) == (0, "")
    assert subprocess.run([sys.executable, "-c", COMPILED], check=False).returncode == 0
