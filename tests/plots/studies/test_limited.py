"""Calls in processes of limited memory."""

import os
import sys
from functools import partial

import pytest
import torch
from fewbit.plots.studies.limited import limited
from fewbit.tables import FewbitError

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
MIB = 1 << 20


@linux
def test_what_fits_returns_and_what_does_not_is_none_whatever_the_warm_up_holds():
    assert limited(partial(bytes, 10 * MIB), 64 * MIB) == bytes(10 * MIB)
    assert limited(partial(torch.ones, 80 * MIB // 4), 64 * MIB) is None
    assert limited(partial(bytes, 80 * MIB), 64 * MIB) is None
    held = partial(exec, "import sys; sys.fewbit_held = bytearray(50 << 20)", {})
    assert len(limited(partial(bytes, 20 * MIB), 64 * MIB, held)) == 20 * MIB


@linux
def test_another_failure_is_told_and_a_killed_process_does_not_fit():
    with pytest.raises(FewbitError, match="the call failed in its process: ValueError: invalid literal"):
        limited(partial(int, "three"), 64 * MIB)
    assert limited(partial(os.abort), 64 * MIB) is None
