import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from fewbit.cli import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    return tmp_path


def fill(folder):
    for name in ("kernels/a.cubin", "kernels/b.cubin", "tables/c.json", "kernels/mine.txt", "notes.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(2**19))


def test_info_counts_and_clear_deletes_what_fewbit_wrote_and_nothing_else(run, folder):
    assert run("cache", "info").out == f"{folder}: 0 files, 0.0 MiB\n"
    fill(folder)
    assert run("cache", "info").out == f"{folder}: 3 files, 1.5 MiB\n"
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


@pytest.mark.deep
def test_warm_leaves_the_solver_nothing_to_compile(tmp_path):
    """Into an empty cache, and without torch, whose kernels take a minute."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    warm = (
        "import sys; sys.modules['torch'] = None; from fewbit.cli.main import main; sys.exit(main(['cache', 'warm']))"
    )
    done = subprocess.run([sys.executable, "-c", warm], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("compiled, or found compiled, in ")
    code = (
        "import sys; from numba.core import event\n"
        "with event.install_recorder('numba:compile') as seen:\n"
        "    import fewbit\n"
        "    for kind in ('shared', 'interval'): fewbit.solve('silu', bits=3, kind=kind)\n"
        "sys.exit(len(seen.buffer))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_warm_compiles_the_kernels_of_activations_and_with_all_every_kernel(run, monkeypatch):
    from fewbit.runtime import self_test

    checked = []
    monkeypatch.setattr(cache, "_compile_solver", lambda: None)
    monkeypatch.setattr(self_test, "outcome", lambda check, backend: checked.append(check))
    kernels = {(c.family, c.kernel, c.dtype) for c in self_test.checks("cpu")}
    for options, families in (([], ("activation", "rounding")), (["--all"], {family for family, _, _ in kernels})):
        checked.clear()
        assert run("cache", "warm", *options).status == 0
        assert {(c.family, c.kernel, c.dtype) for c in checked} == {
            kernel for kernel in kernels if kernel[0] in families
        }


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


@pytest.mark.deep
@pytest.mark.skipif(torch_before_2_9(), reason="the compile backend needs torch 2.9")
def test_warm_all_leaves_compiled_training_nothing_either(run_process):
    """In the cache of the kernels that other tests compile."""
    outcome = run_process("cache", "warm", "--all")
    assert (outcome.status, outcome.out) == (0, "")
    assert subprocess.run([sys.executable, "-c", COMPILED], check=False).returncode == 0
