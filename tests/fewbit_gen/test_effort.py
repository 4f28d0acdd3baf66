"""The seconds that a solve may take: they hold, and what was reached until then is reported as such."""

import itertools

import numpy as np
import pytest
from fewbit.fewbit_gen import effort, solve
from fewbit.tables import FewbitError

SLOW = [
    ("tanh(0.32*(x*(x*x))+0.087)", {"levels": 2, "weight": "uniform:-7.02330582700883,-6.603991027584509"}),
    ("celu(alpha=0.095)", {"weight": "uniform:-0.03,-0.01"}),
]


@pytest.fixture
def clock(monkeypatch):
    """A clock that is a second later at every look: how often it is looked at is how long a solve takes."""
    ticks = itertools.count()
    monkeypatch.setattr(effort.time, "monotonic", lambda: float(next(ticks)))
    return ticks


@pytest.mark.parametrize(("activation", "arguments"), SLOW)
@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_the_bound_reached_is_below_the_error_whenever_time_is_over(clock, activation, arguments, kind):
    bounds = []
    for looks in (3000, 300, 100, 30, 10, 3):
        try:
            table = solve(activation, kind=kind, effort=looks, **arguments)
        except FewbitError as error:
            assert "no table within" in str(error)
            continue
        assert 0 <= table.lower_bound <= table.error
        bounds.append(table.lower_bound)
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_once_time_is_over_hardly_anything_is_done(clock, kind):
    """Looks at the clock after the end: those of loops that stop one after another, not of work."""
    solve("gelu", kind=kind, effort=None)
    total = next(clock)
    with pytest.raises(FewbitError, match="no table within 1 seconds"):
        solve("gelu", kind=kind, effort=1)
    assert next(clock) - total <= 10


def test_without_a_limit_the_clock_changes_nothing(clock):
    assert solve("silu", bits=2, effort=None) == solve("silu", bits=2, effort=1e12)


def test_a_limit_outside_holds_within():
    with effort.within(1e-9), pytest.raises(effort.OutOfTime), effort.within(1e9):
        effort.check()
    with effort.within(1e-9), effort.unhurried():
        effort.check()


def test_compiling_is_not_charged(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(effort.time, "monotonic", lambda: now[0])

    class Kernel:
        signatures = ()

        def __call__(self):
            now[0] += 100.0
            return 7

    with effort.within(10.0):
        assert effort.uncharged(Kernel()) == 7
        effort.check()
        now[0] += 11.0
        with pytest.raises(effort.OutOfTime):
            effort.check()


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "10", True, [1]])
def test_an_effort_that_is_none_is_refused(wrong):
    with pytest.raises(FewbitError, match="effort is a number of seconds above 0, or None for no limit"):
        solve("gelu", effort=wrong)


@pytest.mark.parametrize("seconds", [np.float32(20), 10**400, float("inf"), None])
def test_any_number_will_do(seconds):
    assert solve("relu", effort=seconds).error == 0
