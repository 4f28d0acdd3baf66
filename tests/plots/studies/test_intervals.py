import math

import pytest
from fewbit.plots.studies.intervals import differences, interval


def test_the_interval_is_students():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3 and found.half == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert found.counts and not interval([-1.0, 1.0, 0.5]).counts
    assert (found.low, found.high) == (pytest.approx(3 - found.half), pytest.approx(3 + found.half))


def test_a_single_value_never_counts():
    assert math.isinf(interval([4.0]).half) and not interval([4.0]).counts


def test_equal_values_count_unless_they_are_zero():
    assert interval([0.5, 0.5]).counts and not interval([0.0, 0.0]).counts


def test_runs_are_compared_with_the_exact_one_of_their_seed():
    rows = [
        {"bits": 0, "seed": 0, "loss": 1.0},
        {"bits": 2, "seed": 0, "loss": 1.5},
        {"bits": 2, "seed": 1, "loss": 9.0},
    ]
    (found,) = differences(rows, lambda row: row["bits"] == 0, ("seed",), "loss")
    assert found == (rows[1], 0.5)
