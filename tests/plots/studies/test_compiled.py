"""The study of training under the compile backend, on a tiny model and run op by op."""

import json

import pytest
from compiled import op_by_op
from fewbit.plots.demo.settings import Size
from fewbit.plots.studies import compiled
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def tiny_and_op_by_op(monkeypatch):
    import torch

    def loss(options):
        options = {**options, "smallest": 256} if options.get("bits", 8) is not None else {"bits": 8, "smallest": 10**9}
        backend = op_by_op(FewbitPartitioner(CompileOptions.of(options)))
        return torch.compile(compiled.next_character, backend=backend, fullgraph=True, dynamic=False)

    small = Size(width=64, depth=1, heads=2, context=16)
    monkeypatch.setattr(compiled, "compiled_loss", loss)
    monkeypatch.setattr(
        compiled, "SETTINGS", compiled.replace(compiled.SETTINGS, size=small, batch=4, validation_windows=8)
    )


@pytest.mark.deep
def test_runs_begin_alike_keep_less_and_are_not_run_again(tmp_path, capsys):
    file = tmp_path / "runs.json"
    variants = [f"--variant=gpt2: {name}" for name in ("exact", "auto")]
    arguments = [f"--output={file}", "--seeds=1", "--steps=3", *variants]
    compiled.main(arguments)
    first = json.loads(file.read_text())["runs"]
    exact, auto = first
    assert auto["saved_bytes"] < 0.5 * exact["saved_bytes"]
    assert auto["losses"][0] == exact["losses"][0] and auto["losses"] != exact["losses"]
    capsys.readouterr()
    compiled.main(arguments)
    assert json.loads(file.read_text())["runs"] == first
    assert "gpt2: auto" in capsys.readouterr().out


def test_differences_are_to_the_exact_run_of_the_same_model_and_seed():
    losses = {("gpt2: exact", 0): 2.0, ("gpt2: auto", 0): 2.5, ("llama: exact", 0): 3.0, ("llama: auto", 0): 2.75}
    runs = [{"variant": v, "seed": s, "validation_loss": loss} for (v, s), loss in losses.items()]
    assert compiled.differences(runs) == {"gpt2: auto": [0.5], "llama: auto": [-0.25]}


@pytest.mark.deep
def test_a_run_that_ran_away_is_written_and_is_infinitely_worse(monkeypatch, tmp_path, capsys):
    def ran_away(run, seed):
        return {"variant": run.variant, "seed": seed, "losses": [4.0, nan], "validation_loss": nan, "saved_bytes": 1}

    nan = float("nan")
    file = tmp_path / "runs.json"
    exact = {"variant": "gpt2: exact", "seed": 0, "losses": [4.0, 3.0], "validation_loss": 3.0, "saved_bytes": 2}
    compiled.main([f"--output={file}", "--seeds=1", "--steps=2", "--variant=gpt2: exact"])
    monkeypatch.setattr(compiled, "summary", ran_away)
    compiled.main([f"--output={file}", "--seeds=1", "--steps=2", "--variant=gpt2: 2 bits"])
    assert json.loads(file.read_text())["runs"][-1]["validation_loss"] is None
    assert compiled.differences([exact, json.loads(file.read_text())["runs"][-1]]) == {"gpt2: 2 bits": [float("inf")]}
    assert "+inf" in capsys.readouterr().out
