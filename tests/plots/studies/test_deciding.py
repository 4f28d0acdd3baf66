"""Tasks that decide: an epoch a third of a shallow network, and made-up rows."""

import math

import pytest
from fewbit.plots.demo.digits import Schedule
from fewbit.plots.intervals import Interval
from fewbit.plots.studies import deciding, vquant_rescue
from fewbit.plots.studies.deciding import EARLY, EXACT, LATE

pytest.importorskip("sklearn")


@pytest.fixture
def shallow(monkeypatch):
    """Measure a case on a shallow network, for three epochs."""
    monkeypatch.setattr(vquant_rescue, "DEPTHS", (1, 1))
    monkeypatch.setattr(vquant_rescue, "WIDTH", 4)
    return lambda **case: deciding.measure({"seed": 0, **case}, Schedule(3, 128, 0.05))["losses"]


@pytest.fixture
def made_up():
    """All cases: one range per tensor loses a third, L3 four points or none by seed; few bits early err twice."""
    accuracy = {EXACT: 0.95, "one range per tensor": 0.62, "L2": 0.945, "L3": 0.93, LATE: 0.9, EARLY: 0.8}

    def of(case):
        shift = 0.02 * (-1) ** case["seed"] if case["way"] == "L3" else 0.001 * case["seed"]
        return accuracy[case["way"]] + shift - (0.05 if case.get("rate") == "stays" else 0)

    return [{**case, "accuracy": of(case), "loss": 0.1, "losses": [2.0, 0.1]} for case in deciding.cases()]


def test_every_case_has_what_it_is_compared_with():
    cases = deciding.cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 44
    seeds = {claim: {case["seed"] for case in cases if case["claim"] == claim} for claim in deciding.SEEDS}
    assert not seeds["annealing"] & set(vquant_rescue.SEEDS)


@pytest.mark.deep  # trains
def test_a_rate_that_stays_changes_what_follows_the_first_third(shallow):
    falls, stays = (shallow(claim="annealing", way=LATE, rate=rate) for rate in deciding.RATES)
    assert falls[0] == stays[0] and falls[1] != stays[1]


@pytest.mark.deep  # trains
def test_ways_of_saving_begin_alike_and_differ(shallow):
    losses = [shallow(claim="ranges", way=way) for way in deciding.RANGES]
    assert len({tuple(own) for own in losses}) == len(losses)
    assert max(own[0] for own in losses) < 3


def test_an_outcome_is_by_the_interval_and_the_tolerance():
    assert deciding.outcome(Interval(-0.3, 0.2, 6)) == "fails"
    assert deciding.outcome(Interval(-0.01, 0.005, 6)) == "fails"  # a small loss that counts is one
    assert deciding.outcome(Interval(-0.01, 0.015, 6)) == "no loss"
    assert deciding.outcome(Interval(-0.01, 0.025, 6)) == "undecided"


def test_lines_say_what_fails_and_what_the_rate_adds(made_up):
    told = list(deciding.lines(made_up))
    assert [line.rpartition(", ")[2] for line in told[:3]] == ["fails", "fails", "undecided"]
    late, early = deciding.lateness(made_up)["falls"][0], math.log((359 * 0.1 + 0.5) / (359 * 0.2 + 0.5))
    assert late == pytest.approx(early, abs=0.05) and told[3].endswith("counts")
    assert told[-1].startswith("what the falling rate adds: ")
    assert not any("adds" in line for line in deciding.lines([row for row in made_up if row.get("rate") != "stays"]))


def test_the_figure_has_a_row_for_each_way(made_up):
    ranges, annealing = deciding.draw(made_up).axes
    assert [label.get_text() for label in ranges.get_yticklabels()] == [f"{w}, 2 bits" for w in [*deciding.RANGES][1:]]
    assert len(annealing.get_yticklabels()) == 2
