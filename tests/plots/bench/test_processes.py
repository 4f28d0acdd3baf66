"""Calls in processes of their own, and what they take of memory."""

import os
import sys

import numpy as np
import pytest
from fewbit.plots.bench.processes import ProcessDied, added_peak_bytes, call_apart


def test_the_result_is_of_another_process():
    assert call_apart(os.getpid) != os.getpid()


def test_an_error_is_raised_here():
    with pytest.raises(ValueError, match="invalid literal"):
        call_apart(int, "x")


def test_a_death_is_told():
    with pytest.raises(ProcessDied):
        call_apart(os._exit, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="the system keeps no peak that can begin anew")
def test_the_peak_is_of_the_call_alone():
    np.ones(2**25)  # a quarter of a gigabyte that is freed before
    added = added_peak_bytes(lambda: [np.ones(2**23).sum() for _ in range(2)])
    assert added == pytest.approx(2**26, rel=0.1)  # Linux counts pages by batches of a few hundred KiB
