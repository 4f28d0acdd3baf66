import os

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
