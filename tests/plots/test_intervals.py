import math

import pytest
from fewbit.plots.intervals import Interval, by_seed, differences, holm, interval, verdict


def test_interval_and_p_are_students():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3 and found.half == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert found.counts and not interval([-1.0, 1.0, 0.5]).counts
    assert (found.low, found.high) == (pytest.approx(3 - found.half), pytest.approx(3 + found.half))
    assert math.isinf(interval([4.0]).half) and not interval([4.0]).counts
    assert interval([0.5, 0.5]).counts and not interval([0.0, 0.0]).counts
    from scipy.stats import ttest_1samp

    values = [0.1, 0.3, -0.05, 0.2]
    assert interval(values).p == pytest.approx(ttest_1samp(values, 0).pvalue)
    assert (interval([1.0]).p, interval([0.0, 0.0]).p, interval([2.0, 2.0]).p) == (1, 1, 0)


def test_runs_are_compared_with_the_exact_one_of_their_seed():
    rows = [
        {"bits": 0, "seed": 0, "loss": 1.0},
        {"bits": 2, "seed": 0, "loss": 1.5},
        {"bits": 2, "seed": 1, "loss": 9.0},
    ]
    (found,) = differences(rows, lambda row: row["bits"] == 0, ("seed",), "loss")
    assert found == (rows[1], 0.5)


def test_tasks_of_a_seed_are_one_observation():
    tasks = [(seed, value) for seed, value in enumerate([0.0, 0.4, -0.4]) for _ in range(5)]
    assert by_seed(tasks) == pytest.approx([0.0, 0.4, -0.4])
    assert interval(by_seed(tasks)).half > 2 * interval([value for _, value in tasks]).half


def test_holm_rejects_by_rank_and_stops_at_the_first_that_fails():
    of = [Interval(1.0, 0.5, 5, p) for p in (0.04, 0.001, 0.02, 0.03)]
    assert holm(of) == [False, True, False, False]  # .02 > .05 / 3, and what follows is not asked
    assert holm(of[2:3]) == [True] and holm([]) == []


@pytest.mark.parametrize(
    ("mean", "half", "said"),
    [
        (0.05, 0.01, "above"),
        (-0.05, 0.01, "below"),
        (0.01, 0.005, "equal"),
        (0.0, 0.02, "equal"),
        (0.01, 0.03, "undecided"),
    ],
)
def test_what_a_difference_shows(mean, half, said):
    assert verdict(Interval(mean, half, 5), margin=0.02) == said
