"""`fewbit plot training --method glu`."""

import json

import pytest


@pytest.mark.deep
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
