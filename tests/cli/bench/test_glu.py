"""fewbit bench glu, fewbit plot memory, fewbit plot training --method glu."""

import json

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """The number of threads again that was before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SMALL = ["--tokens", "32", "--hidden", "16", "--intermediate", "64"]


def test_bench_tells_bytes_times_and_bars(run):
    done = run("bench", "glu", *SMALL, "--dtype", "bfloat16", "--rounds", "1", "--json")
    report = json.loads(done.out)
    rows = {row["method"]: row for row in report["rows"]}
    n = 32 * 64
    assert rows["eager"]["units"] == 4 and rows["eager"]["ratio"] == 1
    assert rows["checkpointed"]["kept"] == 32 * 16 * 2
    assert rows["fewbit, parts"]["kept"] == 32 * 16 * 2 + n * 11.25 / 8
    assert rows["fewbit, inputs"]["units"] == 8.25 / 16
    assert rows["fewbit, parts, x in 4 bits"]["kept"] == 32 * 16 * 4.5 / 8 + n * 11.25 / 8  # groups of 64
    assert rows["Liger-Kernel (formula)"]["units"] == 3 and rows["Liger-Kernel (formula)"]["ms"] is None


def test_bench_as_text(run):
    text = run("bench", "glu", *SMALL, "--rounds", "1").out
    assert text.startswith("32 tokens, hidden 16, intermediate 64, float32, cpu\nmethod")
    assert "1.15" in text


def test_memory_is_measured_and_drawn_again(run, tmp_path):
    run("plot", "memory", *SMALL, "-o", tmp_path / "a.png")
    run("plot", "memory", "--input", tmp_path / "a.json", "-o", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_memory_refuses_another_file(run, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    done = run("plot", "memory", "--input", tmp_path / "a.json", "-o", tmp_path / "b.png")
    assert done.status == 2 and "not what `fewbit bench glu` or `fewbit plot memory` writes" in done.err


def test_training_compares_what_it_says(run, tmp_path):
    pytest.importorskip("transformers")
    text = run("plot", "training", "--method", "glu", "--steps", "1", "--seeds", "2", "-o", tmp_path / "a.png").out
    assert [line.split("  ")[0] for line in text.splitlines()[1:5]] == [
        *("exact", "parts 3+4+4", "inputs 4+4", "parts, x in 4"),
    ]
    study = json.loads((tmp_path / "a.json").read_text())
    first = [run["losses"][0] for run in study["trainings"][0]["runs"]]
    assert len(set(first)) == 1  # forward is exact
    again = run("plot", "training", "--method", "glu", "--input", tmp_path / "a.json", "-o", tmp_path / "b.png").out
    assert again == text
