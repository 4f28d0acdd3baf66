"""The search for the largest number that fits."""

import pytest
from fewbit.runtime.plan.largest_batch import largest_by_trial


@pytest.mark.parametrize("most", [0, 1, 2, 7, 60, 100, 1000])
@pytest.mark.parametrize("guess", [1, 64, 500])
def test_search_finds_the_largest_from_any_guess(most, guess):
    tried = []

    def fits(number):
        assert number > 0
        tried.append(number)
        return number <= most

    assert largest_by_trial(fits, guess) == most
    found = largest_by_trial(fits, guess, tolerance=0.05)
    assert most - max(1, 0.05 * most) <= found <= most
    assert len(tried) < 50


def test_a_good_guess_takes_few_trials():
    tried = []
    assert largest_by_trial(lambda number: tried.append(number) or number <= 205, 200, 0.03) in range(199, 206)
    assert len(tried) <= 3
