"""`fewbit plot vquant-…` and `fewbit memory codes`, at the smallest sizes."""

import json
import os

import pytest


def plotted(run, tmp_path, name, *options):
    outcome = run("plot", f"vquant-{name}", *options, "-o", tmp_path / "figure.png")
    assert outcome.status == 0, outcome.err
    assert sorted(os.listdir(tmp_path)) == ["figure.json", "figure.png"]
    again = run("plot", f"vquant-{name}", "--input", tmp_path / "figure.json", "-o", tmp_path / "again.svg")
    assert (again.status, again.out) == (0, outcome.out)
    numbers = json.loads((tmp_path / "figure.json").read_text())
    assert numbers["study"] == f"vquant-{name}"
    return outcome.out, numbers


@pytest.mark.deep
def test_annealing(run, tmp_path, monkeypatch):
    from fewbit.plots.studies import vquant

    monkeypatch.setattr(vquant, "PAIRS", (vquant.PAIRS[1], vquant.PAIRS[3]))
    said, numbers = plotted(run, tmp_path, "annealing", "--seeds", 1, "--epochs", 1)
    assert "(F)-(3,2)-(2,0)" in said
    assert [len(row["accuracies"]) for row in numbers["rows"]] == [1, 1, 1, 1]


@pytest.mark.deep
def test_accuracy(run, tmp_path, monkeypatch):
    from fewbit.plots.studies import vquant

    monkeypatch.setattr(vquant, "configurations", lambda: CONFIGURATIONS)
    _, numbers = plotted(run, tmp_path, "accuracy", "--seeds", 1, "--epochs", 1)
    exact, one_bit, *others = numbers["rows"]
    assert exact["loss"] < one_bit["loss"]  # 1 bit without large values learns worse from the first epoch on
    assert all(row["kept_bytes"] < exact["kept_bytes"] / 4 for row in [one_bit, *others])
    by = {(row["method"], row["bits"]): row["kept_bytes"] for row in others}
    assert by["RV-Quant", 3] < by["V-Quant", 3]


CONFIGURATIONS = [("exact", None, 0.0), ("V-Quant", 1, 0.0), ("V-Quant", 3, 0.02), ("RV-Quant", 3, 0.02)]


def test_memory(run, tmp_path):
    said, numbers = plotted(run, tmp_path, "memory", "--measure", "")
    assert len(numbers["rows"]) == 8
    for row in numbers["rows"]:
        assert row["formula"][0] == pytest.approx(row["paper"][0], rel=0.06)
    assert "ResNet-152" in said


def test_lstm(run, tmp_path, monkeypatch):
    from fewbit.plots.studies import lstm

    sizes = (("small", 8), ("large", 16))
    small = lstm.Settings(sizes, steps=2, characters=60_000, validation_words=1024)
    monkeypatch.setattr(lstm, "Settings", lambda steps: small)
    _, numbers = plotted(run, tmp_path, "lstm", "--steps", 2)
    assert [row["bits"] for row in numbers["rows"]] == [None, 2, 2, 3, 3, 4, 4] * 2
    exact, *packed = numbers["rows"][:7]
    assert all(row["bytes"] < exact["bytes"] / 4 for row in packed)
    assert packed[-1]["perplexity"] == pytest.approx(exact["perplexity"], rel=0.05)


@pytest.mark.deep
def test_inference():
    from fewbit.plots.figures.vquant import plot_inference
    from fewbit.plots.studies import vquant

    found = vquant.inference(vquant.Schedule(epochs=2), bits=(2, 5), ratios=(0.0, 0.03))
    assert [len(rows) for rows in found["rows"].values()] == [8, 8]
    best = found["best"]["after training"]
    assert best is None or best["accuracy"] >= found["accuracy"] - found["tolerance"]
    assert found["pca"][1]["separation"] != found["pca"][0]["separation"]
    assert len(plot_inference(found).axes) == 6


class TestCodes:
    MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(256, 64)

def nothing():
    return nn.Sigmoid(), torch.randn(3, 3, requires_grad=True)
"""

    def test_of_a_function(self, run, tmp_path):
        (tmp_path / "mine.py").write_text(self.MODEL)
        outcome = run("memory", "codes", f"{tmp_path / 'mine.py'}:make", "--compressor", "zlib", "--json")
        assert outcome.status == 0, outcome.err
        result = json.loads(outcome.out)
        # A layer after a ReLU has no codes of its own, and the input of the network none at all.
        assert [row["module"] for row in result["rows"]] == ["1"]
        assert result["total"]["packed_bytes"] == 256 * 64 * 3 / 8
        assert (
            result["rows"][0]["entropy_bytes"]
            < result["rows"][0]["compressed_bytes"]
            < result["rows"][0]["packed_bytes"]
        )
        table = run("memory", "codes", f"{tmp_path / 'mine.py'}:make").out
        assert len(table.splitlines()) == 3

    @pytest.mark.parametrize("target", ["mine.py:nothing", "gpt2"])
    def test_wrong_use_is_one_line(self, run, tmp_path, monkeypatch, target):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.py").write_text(self.MODEL)
        outcome = run("memory", "codes", target)
        assert outcome.status in (1, 2)
        assert not outcome.out
        assert len(outcome.err.splitlines()) == 1
