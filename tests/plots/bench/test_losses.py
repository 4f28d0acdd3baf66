import json

import torch
from fewbit.plots.bench import losses as bench


def test_a_step_in_chunks_stands_beside_torchs(run, tmp_path, monkeypatch):
    """Gradients of each training are torch's but for the order of sums, and a row says whether the bar is met."""
    monkeypatch.setattr(bench, "WORDS", 300)
    monkeypatch.setattr(bench, "TOKENS", 32)
    monkeypatch.setattr(bench, "_peak_apart", lambda trains, how, chunked: 1 << 20 if chunked else None)
    path = tmp_path / "losses.json"
    outcome = run("bench", "losses", "--how", "eager", "--rounds", 1, "-o", path)
    report = json.loads(path.read_text())
    assert [row["trains"] for row in report["rows"]] == ["all weights", "frozen head", "adapters"]
    assert all(row["difference"] < 1e-5 and row["met"] == (row["ratio"] <= 1.05) for row in report["rows"])
    assert (report["rows"][0]["torch_peak"], report["rows"][0]["chunked_peak"]) == (None, 1 << 20)
    assert "chunked ms" in outcome.out


def test_what_is_frozen_has_no_gradient():
    for trains in ("frozen head", "adapters"):
        training = bench.Training(bench.model_of(trains), "eager", True)
        training.step(torch.arange(8)[None])
        trained = [name for name, p in training.model.named_parameters() if p.grad is not None]
        assert trained and "lm_head.weight" not in trained
        assert all((".up." in name or ".down." in name) == (trains == "adapters") for name in trained)
