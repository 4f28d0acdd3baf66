"""`fewbit plot adaptation`, on a few steps of the small transformer."""

import json
import os

import pytest
from fewbit.plots.figures.adaptation import Followed


@pytest.mark.deep
def test_it_trains_measures_draws_and_leaves_its_numbers(run, tmp_path):
    path = tmp_path / "a.png"
    outcome = run("plot", "adaptation", "--model", "small", "--bits", 2, "--adapt", 4, "--steps", 12, "-o", path)
    assert outcome.status == 0, outcome.err
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.png"]
    (only,) = map(Followed.from_dict, json.loads((tmp_path / "a.json").read_text())["runs"])
    assert {e.step for e in only.errors} == {0, 12} and len(only.errors) == 6  # one for each block
    for e in only.errors[:3]:  # before the first step the table in use is the default, and the first is the best
        assert e.following == e.default > e.once == e.best > 0
    for e in only.errors[3:]:
        assert e.best <= min(e.default, e.once, e.following) and e.following < e.default
    losses = only.losses
    assert losses["exact"] != losses["default"] != losses["following"] != losses["exact"]
    assert all(2 < loss < 4 for loss in losses.values())
    row = outcome.out.splitlines()[1].split()
    assert row[:3] == ["small", "2", "0"] and row[-1] == f"{losses['following']:.4f}"
    again = run("plot", "adaptation", "--input", tmp_path / "a.json", "-o", tmp_path / "again.svg")
    assert (again.status, again.out) == (0, outcome.out)
