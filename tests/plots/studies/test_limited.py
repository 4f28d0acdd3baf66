"""Calls in processes of limited memory, and the search for the largest number that fits."""

import os
import sys
from functools import partial

import pytest
import torch
from fewbit.plots.studies.limited import largest_by_trial, limited
from fewbit.tables import FewbitError

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
MIB = 1 << 20


@linux
def test_what_fits_returns_and_what_does_not_is_none():
    assert limited(partial(bytes, 10 * MIB), 64 * MIB) == bytes(10 * MIB)
    assert limited(partial(torch.ones, 80 * MIB // 4), 64 * MIB) is None
    assert limited(partial(bytes, 80 * MIB), 64 * MIB) is None


@linux
def test_what_the_warm_up_holds_does_not_count():
    held = partial(exec, "import sys; sys.fewbit_held = bytearray(50 << 20)", {})
    assert len(limited(partial(bytes, 20 * MIB), 64 * MIB, held)) == 20 * MIB


@linux
def test_another_failure_is_told_and_a_killed_process_does_not_fit():
    with pytest.raises(FewbitError, match="the call failed in its process: ValueError: invalid literal"):
        limited(partial(int, "three"), 64 * MIB)
    assert limited(partial(os.abort), 64 * MIB) is None


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
