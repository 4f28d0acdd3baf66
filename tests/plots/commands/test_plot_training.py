import json
import os
import sys

import pytest
import torch
from fewbit.plots.demo.settings import SETTINGS, Settings, Size


@pytest.fixture
def tiny(monkeypatch):
    """Settings with which a training is quick, and the number of threads again that was before."""
    size = Size(width=16, depth=1, heads=2, context=8)
    monkeypatch.setitem(SETTINGS, "small", Settings(steps=3, batch=2, size=size, validation_windows=4))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_trains_draws_and_leaves_its_numbers(run, tmp_path, tiny):
    options = ["--model", "small", "--steps", 2, "--seeds", 2, "--bits", "3,1", "--control"]
    outcome = run("plot", "training", *options, "-o", tmp_path / "figure.png")
    assert outcome.status == 0, outcome.err
    assert sorted(os.listdir(tmp_path)) == ["figure.json", "figure.png"]
    assert outcome.err == f"wrote {tmp_path / 'figure.json'}\nwrote {tmp_path / 'figure.png'}\n"  # and no progress bar
    study = json.loads((tmp_path / "figure.json").read_text())
    assert (study["model"], [training["settings"]["seed"] for training in study["trainings"]]) == ("small", [0, 1])
    assert set(study["versions"]) == {"python", "fewbit", "torch"}
    for training in study["trainings"]:
        assert [trained["variant"] for trained in training["runs"]] == ["exact", "1 bit", "3 bits", "exact, nudged"]
        assert len({trained["losses"][0] for trained in training["runs"][:3]}) == 1
    for comparison in study["comparisons"]:
        (row,) = [line for line in outcome.out.splitlines() if line.startswith(comparison["variant"] + "  ")]
        assert f"{comparison['validation_difference']:+.4f}" in row
        assert f" {comparison['steps_outside']} of 2 " in row

    (tmp_path / "again").mkdir()
    again = run("plot", "training", "--input", tmp_path / "figure.json", "-o", tmp_path / "again" / "2.svg")
    assert (again.status, again.out) == (0, outcome.out)
    assert os.listdir(tmp_path / "again") == ["2.svg"]


def test_without_transformers_one_line_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    outcome = run("plot", "training", "--steps", 1, "-o", tmp_path / "figure.png")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == "fewbit: training GPT-2 needs transformers: pip install transformers\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "option"),
    [("fewbit", "--control"), ("blpa", "--images"), ("actnn", "--task"), ("glu", "--threads"), ("hooks", "--variant")],
)
@pytest.mark.parametrize("spelled", ["--method {}", "--method={}"])
def test_each_method_has_options_of_its_own(run, method, option, spelled):
    outcome = run("plot", "training", *spelled.format(method).split(), "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("Usage: fewbit plot training ")
    assert option in outcome.out and "[fewbit|blpa|actnn|glu|hooks]" in outcome.out and "Example: " in outcome.out
    assert outcome.out.isascii()


def test_without_a_method_it_is_few_bit_activations(run):
    assert run("plot", "training", "--help").out == run("plot", "training", "--method", "fewbit", "--help").out
