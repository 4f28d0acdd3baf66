import json
import os

import pytest
import torch
from fewbit.plots.studies import actnn

FEW = (actnn.VARIANTS[0], actnn.VARIANTS[3], actnn.VARIANTS[6])


@pytest.fixture
def quick(monkeypatch):
    """Three variants; the number of threads again that was before."""
    monkeypatch.setattr(actnn, "VARIANTS", FEW)
    monkeypatch.setattr(actnn, "block_ratio", lambda bits: 24 / bits)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.deep
def test_it_trains_draws_and_leaves_its_numbers(run, tmp_path, quick):
    options = ["--steps", 2, "--seeds", 2, "--task", "resnet"]
    outcome = run("plot", "training", "--method", "actnn", *options, "-o", tmp_path / "figure.png")
    assert outcome.status == 0, outcome.err
    assert sorted(os.listdir(tmp_path)) == ["figure.json", "figure.png"]
    assert outcome.err == f"wrote {tmp_path / 'figure.json'}\nwrote {tmp_path / 'figure.png'}\n"
    runs = json.loads((tmp_path / "figure.json").read_text())["runs"]
    assert [(one["variant"], one["seed"]) for one in runs] == [(v.name, seed) for seed in (0, 1) for v in FEW]
    assert len({one["losses"][0] for one in runs if one["seed"] == 0 and "AMP" not in one["variant"]}) == 1
    assert "12.00 times at 2 bits" in outcome.out
    for variant in FEW:
        assert any(line.startswith(variant.name + "  ") for line in outcome.out.splitlines())

    (tmp_path / "again").mkdir()
    again = run(
        "plot", "training", "--method", "actnn", "--input", tmp_path / "figure.json", "-o", tmp_path / "again" / "2.svg"
    )
    assert (again.status, again.out) == (0, outcome.out)
    assert os.listdir(tmp_path / "again") == ["2.svg"]
