import json

import torch
from fewbit.cli.main import main
from fewbit.runtime import bench_outliers
from fewbit.runtime.inference.vquant import value_aware


def network():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))


def test_measures_and_tells_the_bars(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_outliers, "SIZES", (1 << 12, 1 << 13))
    monkeypatch.setattr(bench_outliers, "CASES", (bench_outliers.Case("small", network, 2, 8, 5),))
    file = tmp_path / "outliers.json"
    assert main(["bench", "outliers", "--rounds", "2", "--json", "-o", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    assert [row["n"] for row in report["pairs"]] == [1 << 12, 1 << 13]
    for row in report["pairs"]:
        assert row["bar"] == 2.5
        assert row["met"] == (max(row["ratio"], row["relu_ratio"]) <= 2.5)
    (row,) = report["steps"]
    assert (row["case"], row["bits"], row["outliers"], row["bar"]) == ("small", 3, 0.02, 1.1)
    assert row["met"] == (row["ratio"] <= 1.1)
    assert main(["bench", "outliers", "--rounds", "1"]) == 0
    assert "PerGroup ms" in capsys.readouterr().out


def test_arguments_are_checked(capsys):
    for arguments in (["--bits", "1"], ["--bits", "9"], ["--ratio", "1.5"]):
        assert main(["bench", "outliers", *arguments]) == 2
        assert capsys.readouterr().err.strip()


def test_cases_convert_whole():
    """Every ReLU and convolution of them saves by V-Quant, and they take the images they are said to."""
    for case in bench_outliers.CASES:
        with torch.device("meta"):
            model = case.build()
            assert model(torch.empty(1, 3, case.size, case.size)).shape == (1, case.classes)
        kinds = [type(module) for module in model.modules()]
        expected = sum(kind in (torch.nn.ReLU, torch.nn.Conv2d, torch.nn.Linear) for kind in kinds)
        replaced = value_aware(model).replaced
        assert sum("Pool" not in entry.was for entry in replaced) == expected
