"""Leaves the compile backend's tests out where torch lacks what the backend needs (before 2.9)."""

import pytest
from fewbit.runtime.compile import factors
from fewbit.runtime.compile.backend import _known

collect_ignore_glob = [] if "custom_partitioner_fn" in _known() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Let tables be solved however busy the processor is: a factor without one is rounded otherwise."""
    monkeypatch.setattr(factors, "SECONDS", 120.0)
