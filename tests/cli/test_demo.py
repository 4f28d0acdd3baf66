import json
import os

import pytest


@pytest.mark.deep
def test_the_demo_solves_draws_trains_and_leaves_its_files(run_process, tmp_path):
    folder = tmp_path / "deep" / "output"
    outcome = run_process("demo", "--steps", 2, "--bits", "2,1", "--seed", 3, "--output", folder)
    assert outcome.status == 0, outcome.err
    assert "gelu: 3 bits, 8 levels" in outcome.out
    variants = ["exact", "1 bit", "2 bits", "exact, weights 4", "exact, weights 5", "exact, weights 6"]
    assert [line.split("  ")[0] for line in outcome.out.splitlines() if " ms" in line] == variants
    assert sorted(os.listdir(folder)) == ["gelu.json", "gelu.png", "training.json", "training.png"]
    assert outcome.err.splitlines() == [
        f"wrote {folder / name}" for name in ("gelu.json", "gelu.png", "training.png", "training.json")
    ]  # and no progress bar
    training = json.loads((folder / "training.json").read_text())
    assert (training["settings"]["steps"], training["settings"]["seed"]) == (2, 3)
    assert [run["variant"] for run in training["runs"]] == variants
    first = {run["variant"]: run["losses"][0] for run in training["runs"]}
    assert first["exact"] == first["1 bit"] == first["2 bits"]
    assert len(set(first.values())) == 4  # other weights, other losses
    for run in training["runs"]:
        assert f"{run['validation_loss']:.4f}" in outcome.out
        assert f"{run['activation_bytes']:,} B" in outcome.out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", 0, "steps must be 1 or more"),
        ("--seed", -1, "seed must be from 0"),
        ("--bits", "3,9", "bits"),
        ("--bits", "few", "'few' is not a list of whole numbers"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(run, tmp_path, option, value, message):
    outcome = run("demo", option, value, "--output", tmp_path / "output")
    assert outcome.status == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not outcome.out
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_a_file_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    outcome = run("demo", "--output", tmp_path / "file")
    assert outcome.status == 2
    assert f"cannot make the folder {tmp_path / 'file'}: " in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.deep
def test_a_missing_package_is_named_with_the_way_to_install_it(run_process, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    outcome = run_process("demo", "--output", tmp_path / "output", env=environment)
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == (
        "fewbit: this command needs torch, which is not installed: pip install torch (build: fewbit doctor)"
    )


def test_what_was_trained_before_is_drawn_again(run, tmp_path):
    run_of = {"losses": [3.0, 2.0], "seconds": [0.1, 0.1], "activation_bytes": 8, "saved_bytes": 16}
    losses = {"exact": 2.0, "2 bits": 2.1, "exact, weights 1": 2.2}
    size = {"width": 8, "depth": 1, "heads": 1, "context": 4}
    trained = {
        "settings": {"steps": 2, "size": size},
        "unigram_entropy": 3.0,
        "runs": [{"variant": name, "validation_loss": loss, **run_of} for name, loss in losses.items()],
    }
    (tmp_path / "before.json").write_text(json.dumps(trained))
    outcome = run("demo", "--input", tmp_path / "before.json", "--output", tmp_path / "again")
    assert outcome.status == 0, outcome.err
    assert os.listdir(tmp_path / "again") == ["training.png"]
    assert "exact runs are 2.0000 to 2.2000" in outcome.out
    outcome = run("demo", "--input", tmp_path / "before.json", "--steps", 3)
    assert outcome.status == 2 and "leave out --steps" in outcome.err


@pytest.mark.parametrize("text", ["{}", "nothing", '{"runs": []}'])
def test_another_file_is_not_drawn(run, tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    outcome = run("demo", "--input", tmp_path / "other.json", "--output", tmp_path / "again")
    assert outcome.status == 2
    assert outcome.err.splitlines()[-1].endswith("other.json: not what `fewbit demo` writes")
