import json

import pytest
import torch
from fewbit.cli.main import main
from fewbit.runtime import bench_preact


def test_measures_and_tells_the_bar(capsys, tmp_path, monkeypatch):
    cases = (
        bench_preact.Case("layers", None, 4, 2, 8),
        bench_preact.Case("network", 11, 4, 2, 8),
    )
    monkeypatch.setitem(bench_preact.CASES, "cpu", cases)
    file = tmp_path / "preact.json"
    assert main(["bench", "preact", "--rounds", "2", "--json", "-o", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    assert [row["case"] for row in report["steps"]] == ["layers", "network"]
    assert all(row["bar"] == 1.10 and row["met"] == (row["ratio"] <= 1.10) for row in report["steps"])
    assert main(["bench", "preact", "--rounds", "1"]) == 0
    assert "of torch" in capsys.readouterr().out


def test_bits_are_checked(capsys):
    assert main(["bench", "preact", "--bits", "9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_one_line_says_so(capsys):
    assert main(["bench", "preact", "--device", "cuda"]) == 2
    assert "there is none" in capsys.readouterr().err
