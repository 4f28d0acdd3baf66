import json

import torch
from fewbit.plots.bench import outliers as bench
from fewbit.runtime.inference.vquant import value_aware


def network():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))


def test_quantizers_and_steps_are_measured_and_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SIZES", (1 << 12, 1 << 13))
    monkeypatch.setattr(bench, "CASES", (bench.Case("small", network, 2, 8, 5),))
    path = tmp_path / "outliers.json"
    outcome = run("bench", "outliers", "--rounds", 1, "-o", path)
    report = json.loads(path.read_text())
    assert (report["bits"], report["ratio"], report["device"]) == (3, 0.02, "cpu")
    assert [(row["n"], row["bar"]) for row in report["pairs"]] == [(1 << 12, 2.5), (1 << 13, 2.5)]
    (row,) = report["steps"]
    assert (row["case"], row["bits"], row["outliers"], row["bar"]) == ("small", 3, 0.02, 1.1)
    assert row["fewbit_faults"] is None or row["fewbit_faults"] >= 0
    assert "PerGroup ms" in outcome.out and "small    2x8x8" in outcome.out


def test_bars_are_met_up_to_their_ratios():
    """Of both quantizers that of pairs, and that of a step by the clock."""
    for ratios, met in (((2.5, 2.5), True), ((2.5, 2.51), False), ((2.51, 2.5), False), ((0.1, 0.1), True)):
        row = bench.PairTime(64, 1.0, 1.0, 1.0, *ratios, 9.0, 9.0)
        assert row.met is met and row.to_dict()["met"] is met
    for ratio, met in ((1.1, True), (1.11, False)):
        row = bench.StepTime("a", 2, 8, 3, 0.02, 1.0, 1.0, ratio, 9.0, 9.0, 9.0, None, None)
        assert row.met is met and row.to_dict()["met"] is met


def test_cases_convert_whole():
    """Every ReLU and convolution of them saves by V-Quant, and they take the images they are said to."""
    for case in (*bench.CASES, *bench.GPU_CASES):
        with torch.device("meta"):
            model = case.build()
            assert model(torch.empty(1, 3, case.size, case.size)).shape == (1, case.classes)
        kinds = [type(module) for module in model.modules()]
        expected = sum(kind in (torch.nn.ReLU, torch.nn.Conv2d, torch.nn.Linear) for kind in kinds)
        replaced = value_aware(model).replaced
        assert sum("Pool" not in entry.was for entry in replaced) == expected
