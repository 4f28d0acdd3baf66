"""A task on which naive rounding fails: a few steps of a shallow network, and made-up rows."""

from dataclasses import replace

import pytest
from fewbit.plots.intervals import Interval
from fewbit.plots.studies import naive
from fewbit.plots.studies.naive import EXACT, WAYS

pytest.importorskip("mlxtend")


@pytest.fixture
def made_up():
    """All cases: 8 bits end as exact by seed, 4 bits a tenth above, naive ones two nats and half of the images."""
    above = {EXACT: 0.0, "8 bits": 0.0, "4 bits": 0.1, "naive, 8 bits": 2.0, "naive, 4 bits": 3.0}

    def of(case):
        loss = 0.7 + above[case["way"]] + (0.01 * (-1) ** case["seed"] if case["way"] != EXACT else 0)
        return {"loss": loss, "error": loss / 4, "own_error": loss / 5}

    return [{**case, **of(case)} for case in naive.cases()]


def test_every_way_is_run_with_every_seed_and_none_of_the_pilots():
    cases = naive.cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 25
    assert not {100, 101} & {case["seed"] for case in cases}


@pytest.mark.deep  # trains
def test_ways_begin_alike_but_for_the_forward_pass_and_only_naive_ones_are_tested_otherwise_than_trained():
    settings = replace(naive.SETTINGS, depth=11, steps=10, batch=16)
    found = {way: naive.measure({"way": way, "seed": 0}, settings) for way in (EXACT, "4 bits", "naive, 4 bits")}
    first = {way: row["losses"][0] for way, row in found.items()}
    assert first[EXACT] == first["4 bits"] != first["naive, 4 bits"]
    assert len(found[EXACT]["losses"]) == 10 and found[EXACT]["loss"] == found[EXACT]["losses"][-1]


def test_an_outcome_is_by_the_corrected_interval_and_the_margin():
    assert naive.outcome(Interval(0.05, 0.02, 5), True, 0.1) == "loses"  # within the margin, and a loss
    assert naive.outcome(Interval(-0.05, 0.02, 5), True, 0.1) == "no loss"  # below exact's
    assert naive.outcome(Interval(0.02, 0.05, 5), False, 0.1) == "no loss"
    assert naive.outcome(Interval(0.02, 0.09, 5), False, 0.1) == "undecided"


def test_lines_say_what_loses_and_what_the_exact_forward_pass_is_worth(made_up):
    shown = {key: word for key, (_, word) in naive.outcomes(made_up).items()}
    assert {shown[way, "loss"] for way in WAYS[1:]} == {"loses"} and shown["8 bits", "loss"] == "no loss"
    told = list(naive.lines(made_up))
    assert len(told) == 12 and told[-1] == "naive less 4 bits: error +0.7250 ± 0.0000, counts"


def test_the_figure_has_a_row_for_each_way(made_up):
    axes = naive.draw(made_up).axes
    assert [[label.get_text() for label in one.get_yticklabels()] for one in axes] == [WAYS] * 3
