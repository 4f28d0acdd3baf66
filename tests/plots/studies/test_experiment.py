"""Experiments: what is missing is measured, in processes, into a file that resumes."""

import json
import os
from dataclasses import replace

import pytest
from fewbit.plots.studies import __main__ as command
from fewbit.plots.studies.experiment import run
from fewbit.tables import FewbitError
from squares import EXPERIMENT, cases, measure


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_every_case_has_a_row_in_the_order_of_cases(tmp_path, workers):
    rows = run(EXPERIMENT, tmp_path, workers)
    assert [(row["bits"], row["seed"], row["square"]) for row in rows] == [(1, 0, 1), (2, 0, 4), (1, 1, 1), (2, 1, 4)]
    assert ({row["process"] for row in rows} == {os.getpid()}) == (workers == 1)
    assert (tmp_path / "squares.png").exists()


def test_what_was_broken_off_is_gone_on_with(tmp_path):
    def broken(case):
        if case["bits"] == 2:
            raise RuntimeError("broken off")
        return measure(case)

    with pytest.raises(RuntimeError, match="broken off"):
        run(replace(EXPERIMENT, measure=broken), tmp_path, workers=1)
    first = json.loads((tmp_path / "squares.json").read_text())["rows"]
    assert len(first) == 1 and len(EXPERIMENT.missing(tmp_path)) == 3
    assert run(EXPERIMENT, tmp_path, workers=1)[0] == first[0]
    assert EXPERIMENT.missing(tmp_path) == []


def test_a_figure_is_drawn_again_when_nothing_is_missing(tmp_path):
    run(EXPERIMENT, tmp_path, workers=1)
    (tmp_path / "squares.png").unlink()
    run(EXPERIMENT, tmp_path)
    assert (tmp_path / "squares.png").exists()


def test_cases_that_are_no_more_are_left_out_of_the_results(tmp_path):
    run(EXPERIMENT, tmp_path, workers=1)
    fewer = replace(EXPERIMENT, cases=lambda: cases()[:1])
    assert len(run(fewer, tmp_path)) == 1
    assert len(json.loads(EXPERIMENT.path(tmp_path).read_text())["rows"]) == 4


def test_another_file_is_refused(tmp_path):
    EXPERIMENT.path(tmp_path).write_text('{"rows": 3}')
    with pytest.raises(FewbitError, match=r"squares\.json: no file of an experiment"):
        EXPERIMENT.missing(tmp_path)


def test_the_command_says_how_long_and_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "EXPERIMENTS", ("squares",))
    monkeypatch.setattr(command, "experiment_of", lambda name: EXPERIMENT)
    command.main(["--list", "-o", str(tmp_path)])
    assert "0 of    4 cases measured,    3 minutes left" in capsys.readouterr().out
    command.main(["squares", "--workers", "1", "-o", str(tmp_path)])
    assert "4 rows" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["cubes"])
    assert "no experiment 'cubes'; there are squares" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_each_experiment_has_a_page_and_a_time(name):
    experiment = command.experiment_of(name)
    cases = experiment.cases()
    assert experiment.name == name
    assert all(experiment.seconds(case) > 0 for case in cases)
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    page = (command.RESULTS / f"{name}.md").read_text()
    assert all(f"**{part}.**" in page for part in ("Question", "Design", "Refuted by", "Outcome", "Limits"))
