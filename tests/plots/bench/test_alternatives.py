"""`fewbit bench alternatives`: what it measures of each way, and what it says of ways that fail."""

import json

import pytest
import torch
from fewbit.plots.bench import alternatives
from fewbit.plots.bench.alternatives import CHECKPOINTING, EXACT, PLAN, TASKS, Way, measure, ways_of
from fewbit.tables import FewbitError
from small_modules import llama


def tiny():
    ids = torch.randint(0, 64, (4, 64))
    return llama(layers=4, words=64, num_key_value_heads=2, use_cache=False), {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(alternatives, "TASKS", {name: (text, tiny) for name, (text, _) in TASKS.items()})


@pytest.mark.deep
def test_each_way_keeps_what_it_says():
    rows = {row.way: row for row in measure("llama", ways_of("llama", compiled=False), rounds=1)}
    assert not any(row.wrong for row in rows.values())
    exact = rows[EXACT]
    assert exact.error == rows[CHECKPOINTING].error == rows["save_on_cpu"].error == 0
    assert rows["selective checkpointing"].error == 0
    assert rows[CHECKPOINTING].kept < rows["selective checkpointing"].kept < exact.kept
    assert rows["L2, parts, hooks"].kept < rows["L2, gated parts"].kept < rows["L2"].kept < exact.kept
    assert rows["checkpoints, 4 bits"].kept < rows["checkpoints, 8 bits"].kept < rows[CHECKPOINTING].kept < exact.kept
    assert rows[PLAN].peak <= rows[CHECKPOINTING].peak
    exact_ones = (
        EXACT,
        CHECKPOINTING,
        "selective checkpointing",
        "save_on_cpu",
        PLAN,
    )  # a plan may recompute and round nothing
    assert all(0 < row.error < 0.6 for name, row in rows.items() if name not in exact_ones)


def test_a_way_that_fails_is_named(monkeypatch):
    def broken(_):
        raise FewbitError("no such thing here")

    monkeypatch.setattr(alternatives, "WAYS", {EXACT: Way(), "broken": Way(broken)})
    _, row = measure("llama", [EXACT, "broken"], rounds=1)
    assert row.wrong == "FewbitError: no such thing here"
    assert any("no such thing here" in line for line in alternatives.lines_of([_, row], "here"))


def test_ways_with_gates_are_for_models_with_gates():
    assert "L2, gated parts" in ways_of("llama", True) and "L2, gated parts" not in ways_of("gpt2", True)
    assert "compile, save_on_cpu" in ways_of("cnn", True, "cuda") and "compile, save_on_cpu" not in ways_of("cnn", True)
    assert "compile, fewbit" in ways_of("cnn", True) and "compile, fewbit" not in ways_of("cnn", False)


@pytest.mark.deep
def test_the_command_writes_what_it_measured(run, tmp_path):
    path = tmp_path / "found.json"
    outcome = run("bench", "alternatives", "--task", "long", "--no-compiled", "--rounds", "1", "-o", path)
    assert outcome.status == 0, outcome.err
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == ways_of("long", False)
    assert "error of the gradient" in outcome.out
