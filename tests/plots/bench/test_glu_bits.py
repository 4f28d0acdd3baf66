"""`fewbit bench glu-bits`: which ways to share out the bits are measured, and in which order they are printed."""

import json

import pytest
import torch
from fewbit.plots.bench import glu_bits as bench
from fewbit.plots.studies.glu_errors import GradientError


@pytest.fixture
def measured(monkeypatch):
    """What was measured; errors are made up: the more bits of the code, the larger."""
    asked = []

    def gradient_errors(model, loss, splits, draws):
        asked.append((model, draws, splits))
        yield from (GradientError(split, 0.001 * split.code, 0.5) for split in splits)

    monkeypatch.setattr(bench, "trained", lambda steps: (f"a model of {steps} steps", None))
    monkeypatch.setattr(bench, "gradient_errors", gradient_errors)
    return asked


def test_all_ways_are_measured_and_the_best_comes_first(run, measured, tmp_path):
    outcome = run("bench", "glu-bits", "--bits", 8, "--steps", 3, "--draws", 2, "-o", tmp_path / "bits.json")
    ((model, draws, splits),) = measured
    assert (outcome.status, model, draws) == (0, "a model of 3 steps", 2)
    report = json.loads((tmp_path / "bits.json").read_text())
    assert (report["steps"], report["draws"], len(report["rows"])) == (3, 2, len(splits))
    parts = [row for row in report["rows"] if row["keep"] == "parts"]
    assert report["rows"][: len(parts)] == parts == sorted(parts, key=lambda row: row["total"])
    assert all(row["total"] == row["noise"] + row["bias"] for row in report["rows"])
    assert outcome.out.splitlines()[0].split()[:3] == ["keep", "code", "up"]
    assert outcome.out.splitlines()[1].split()[:2] == ["parts", "1"]


def test_inputs_are_measured_at_eight_bits_whatever_the_others_have(run, measured):
    run("bench", "glu-bits", "--bits", 11)
    splits = measured[0][2]
    assert {split.bits for split in splits if split.keep == "parts"} == {11.25}
    assert 8.25 in {split.bits for split in splits if split.keep == "inputs"}


def test_each_run_measures_the_same_model():
    """Models whose weights were drawn anew in each process differed threefold in what rounding does to them."""
    (first, loss), (again, other) = bench.trained(1), bench.trained(1)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and torch.equal(loss(first), other(again))
