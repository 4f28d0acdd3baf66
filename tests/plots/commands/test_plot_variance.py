import json
import os

import pytest
from fewbit.plots.studies import variance


@pytest.fixture
def tiny(monkeypatch):
    """A measurement that is quick."""
    whole = variance.VarianceSettings

    def small(**given):
        return whole(width=2, batch=8, curve_bits=(1.5, 2), seeds=1, **given)

    monkeypatch.setattr(variance, "VarianceSettings", small)


@pytest.mark.deep
def test_it_measures_draws_and_leaves_its_numbers(run, tmp_path, tiny):
    outcome = run("plot", "variance", "--draws", 2, "--steps", 2, "--bits", 3, "-o", tmp_path / "v.png")
    assert outcome.status == 0, outcome.err
    assert sorted(os.listdir(tmp_path)) == ["v.json", "v.png"]
    assert outcome.err == f"wrote {tmp_path / 'v.json'}\nwrote {tmp_path / 'v.png'}\n"
    report = json.loads((tmp_path / "v.json").read_text())
    assert report["settings"]["bits"] == 3
    (row,) = [line for line in outcome.out.splitlines() if line.startswith("2.conv2 ")]
    at = report["layers"].index("2.conv2")
    assert f"{report['empirical'][at]:.2e}" in row
    assert "mixed precision" in outcome.out

    again = run("plot", "variance", "--input", tmp_path / "v.json", "-o", tmp_path / "again.svg")
    assert (again.status, again.out) == (0, outcome.out)
