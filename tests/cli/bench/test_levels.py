import json

import pytest
from fewbit.cli.main import main
from fewbit.plots.studies.networks import NETWORKS, resnet


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(NETWORKS, "ResNet-50", lambda: resnet(1, 1, bottleneck=True))


def test_tells_time_and_memory_of_every_level(small, capsys, tmp_path):
    file = tmp_path / "levels.json"
    arguments = ["bench", "levels", "--batch", "2", "--image-size", "40", "--steps", "1"]
    assert main([*arguments, "--json", "-o", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    assert [row["level"] for row in report["rows"]] == ["exact", "L1", "L2", "L3", "L4", "L5"]
    assert (report["device"], report["batch"], report["image_size"], report["steps"]) == ("cpu", 2, 40, 1)
    assert report["met"] == {}
    assert all(row["largest_batch"] is None and row["ms"] > 0 for row in report["rows"])
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("2 images of 40x40", "L5", "1.00"))


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--image-size", "32"], ["--steps", "x"]])
def test_sizes_are_checked(capsys, arguments):
    assert main(["bench", "levels", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_gpu_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "levels", "--device", "cuda"]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err
