import time

import pytest
import torch
from fewbit.plots.bench import timing
from fewbit.plots.bench.timing import (
    Times,
    clock_of,
    computing,
    processor,
    readings,
    repeated,
    synchronized,
    take_turns,
    timed,
)


@pytest.fixture
def calls():
    """Who was called, in order."""
    return []


def contestants(calls, *names):
    return {name: lambda name=name: calls.append(name) for name in names}


def test_contestants_take_turns_and_the_warm_up_is_not_counted(calls):
    times = take_turns(contestants(calls, "fewbit", "torch"), rounds=4)
    assert calls == ["fewbit", "torch"] * 6
    assert [len(times.of(who)) for who in ("fewbit", "torch")] == [4, 4]


def test_every_round_may_begin_with_another(calls):
    found = readings(contestants(calls, *"abc"), 3, lambda run: run(), warm_up=1, rotate=True)
    assert "".join(calls) == "abcbcacababc"
    assert [set(row) for row in found] == [set("abc")] * 3


def test_what_follows_a_call_is_not_measured(calls):
    runs = contestants(calls, "a", "b")
    times = take_turns(runs, 1, warm_up=0, after=lambda who: (calls.append(f"after {who}"), time.sleep(0.2)))
    assert calls == ["a", "after a", "b", "after b"]
    assert max(times.of("a") + times.of("b")) < 0.2


def test_no_round_begins_after_the_budget_but_one_there_is(calls):
    assert len(take_turns(contestants(calls, "a"), 5, warm_up=0, budget=0.0).rounds) == 1
    assert len(take_turns(contestants(calls, "a"), 5, warm_up=0, budget=60.0).rounds) == 5


def test_numbers_of_all_rounds():
    times = Times([{"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 4.0}, {"a": 3.0, "b": 1.0}])
    assert (times.median("a"), times.best("a"), times.of("b")) == (3.0, 1.0, [2.0, 4.0, 1.0])
    assert times.ratio("a", to="b") == 1.25  # the median of 0.5, 1.25 and 3, not the ratio of medians


def test_a_result_is_freed_after_the_time_is_taken():
    class Result:
        def __del__(self):
            time.sleep(0.2)

    assert processor(Result) < 0.2


def test_computing_is_not_waiting_and_timed_returns_the_result():
    assert computing(lambda: time.sleep(0.2)) < 0.1
    assert computing(lambda: sum(range(10**6))) > 0
    seconds, result = timed(lambda: time.sleep(0.02) or "done")
    assert seconds >= 0.02 and result == "done"


def test_repeated_calls_so_often(calls):
    repeated(lambda: calls.append(1), 5)()
    assert calls == [1] * 5


def test_the_gpu_is_idle_before_and_after(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    assert synchronized(lambda: calls.append("run")) >= 0
    assert calls == ["synchronize", "run", "synchronize"]


class Event:
    """An event of a GPU that is not there; the log says what it was asked to do."""

    log: list

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.log.append("record")

    def synchronize(self):
        self.log.append("synchronize")

    def elapsed_time(self, other):
        return 250.0  # milliseconds


@pytest.mark.parametrize(("clock", "before"), [("gpu_events", []), ("gpu_alone", ["sleep"])])
def test_events_of_the_gpu_stand_around_a_call(calls, monkeypatch, clock, before):
    Event.log = calls
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"), raising=False)
    assert getattr(timing, clock)(lambda: calls.append("run")) == 0.25
    assert calls == [*before, "record", "run", "record", "synchronize"]


def test_a_device_has_its_clock():
    assert (clock_of("cpu"), clock_of("cuda")) == (processor, synchronized)
