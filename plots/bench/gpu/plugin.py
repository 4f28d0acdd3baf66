"""A plugin of pytest: some of the tests, the same in every process, and what came of them as lines of JSON.

    FEWBIT_GPU_TESTS=0.1 python -m pytest -p fewbit.plots.bench.gpu.plugin -m gpu …

`FEWBIT_GPU_TESTS` is the share to run: `0.1` a tenth, the first of each function of tests among them; `-0.1` the rest.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from typing import Any
from zlib import crc32

import pytest

VARIABLE = "FEWBIT_GPU_TESTS"
_EVERY = 2.0  # seconds between two lines
_TRACE, _NAMES = 14, 4  # lines of a failure, tests of one message
_NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d.,]*(e[+-]?\d+)?")


def chosen(names: list[str], share: float) -> list[bool]:
    """Return which tests a share has: by their names alone, so that every process chooses the same.

    Args:
        names: of the tests, with the parameters in brackets.
        share: from 0 to 1, or its negative for the tests that it lacks.
    """
    seen: set[str] = set()
    found = []
    for name in names:
        function = name.split("[")[0]
        found.append(function not in seen or crc32(name.encode()) % 1000 < 1000 * abs(share))
        seen.add(function)
    return found if share >= 0 else [not one for one in found]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the chosen tests."""
    share = float(os.environ.get(VARIABLE, "1"))
    own = [item for item in items if item.get_closest_marker("gpu")]
    names = sorted(item.nodeid for item in own)
    keep = {name for name, one in zip(names, chosen(names, share), strict=True) if one}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in keep])
    items[:] = [item for item in items if item.nodeid in keep]


def pytest_configure(config: pytest.Config) -> None:
    """Report from the process that hands out the tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary())


class Summary:
    """What came of the tests so far: counts, failures by message, skips by reason, the slowest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, dict[str, Any]] = {}
        self.skips: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.said = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's result; say it if the last line is some seconds old."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.counts["failed"] += 1
            self._add(report)
        elif report.skipped:
            self.counts["skipped"] += 1
            self.skips[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.when == "call":
            self.counts["passed"] += 1
        if time.monotonic() - self.said > _EVERY:
            self.say()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be imported as a failure."""
        if report.failed:
            self.counts["failed"] += 1
            self._add(report)

    def pytest_sessionfinish(self) -> None:
        """Say all."""
        self.say()

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Add a failure to those of its message, which differ by numbers."""
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message.splitlines()[0] if crash and crash.message else str(report.longrepr).strip()[-300:]
        one = self.failures.setdefault(
            _NUMBER.sub("#", message)[:200],
            {"count": 0, "message": message[:400], "tests": [], "trace": report.longreprtext.splitlines()[-_TRACE:]},
        )
        one["count"] += 1
        if len(one["tests"]) < _NAMES:
            one["tests"].append(report.nodeid)

    def say(self) -> None:
        """Print a line of JSON."""
        self.said = time.monotonic()
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])[:8]
        failures = sorted(self.failures.values(), key=lambda one: -one["count"])
        said = {
            "ok": not failures,
            **self.counts,
            "failures": failures,
            "skips": dict(self.skips),
            "slowest": {name: round(seconds, 1) for name, seconds in slowest},
        }
        print(f"\n{json.dumps(said)}", file=sys.__stdout__, flush=True)
