import json

import pytest
from fewbit.plots.bench import preact as bench
from fewbit.plots.bench.preact import BARS, Case, StepTime


def test_cases_are_measured_and_reported(run, tmp_path, monkeypatch):
    cases = (Case("layers", None, 4, 2, 8), Case("network", 11, 4, 2, 8))
    monkeypatch.setitem(bench.CASES, "cpu", cases)
    path = tmp_path / "preact.json"
    outcome = run("bench", "preact", "--rounds", 1, "--bits", 3, "--threads", 1, "-o", path)
    report = json.loads(path.read_text())
    assert report["device"] == "1 threads"
    assert [(row["case"], row["bits"], row["bar"]) for row in report["steps"]] == [
        ("layers", 3, 1.10),
        ("network", 3, 1.10),
    ]
    heading, head, *rows = outcome.out.splitlines()
    assert heading.endswith(", 1 threads") and "of torch" in head
    assert [row.split()[0] for row in rows] == ["layers", "network"]


@pytest.mark.parametrize(("device", "bar"), [("cpu", 1.10), ("cuda", 1.05)])
def test_a_bar_is_met_up_to_its_ratio(device, bar):
    assert BARS[device] == bar
    for ratio, met in ((bar, True), (bar + 1e-9, False)):
        row = StepTime("a", 4, 1.0, 1.0, 1.0, ratio, 2.0, BARS[device])
        assert row.met is met and row.to_dict()["met"] is met
