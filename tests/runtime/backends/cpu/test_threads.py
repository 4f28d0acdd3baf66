"""Whoever the threads are, each part of a job is done once, and the caller waits for the last."""

import concurrent.futures
import ctypes
import threading
import time

import pytest
import torch
from fewbit.runtime.backends.cpu import threads as team
from in_threads import in_threads


@pytest.fixture(params=["openmp", "pool"])
def workers(request, monkeypatch):
    """Both kinds of threads, the first where this system has it."""
    if request.param == "pool":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    elif team._openmp() is None:
        pytest.skip("no OpenMP library that is called as GNU's")


class Recorder:
    """A kernel in Python: notes which thread did which blocks."""

    def __init__(self, at_work=0.0):
        self.done = []
        self.by = set()
        self._lock = threading.Lock()
        self._at_work = at_work
        call = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(self._work)
        address = ctypes.cast(call, ctypes.c_void_p).value
        assert address is not None
        self.kernel = team.Kernel(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), call)

    def _work(self, job):
        parts, blocks = job[1], job[2]
        self.arguments = [job[i] for i in range(3, 6)]
        while True:
            with self._lock:
                part = job[0]
                job[0] += 1
            if part >= parts:
                return
            time.sleep(self._at_work)
            with self._lock:
                self.by.add(threading.get_ident())
                self.done.extend(range(blocks * part // parts, blocks * (part + 1) // parts))


@pytest.mark.usefixtures("workers")
class TestRun:
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    @pytest.mark.parametrize("blocks", [0, 1, 255, 256, 1000, 1001, 5 * team.BLOCKS_PER_THREAD - 1])
    def test_every_block_is_done_once(self, blocks, count, threads):
        threads(count)
        recorder = Recorder()
        team.run(recorder.kernel, blocks, 7, -8, 1 << 62)
        assert sorted(recorder.done) == list(range(blocks))
        assert recorder.arguments == [7, -8, 1 << 62]

    @pytest.mark.parametrize("count", [1, 3])
    def test_as_many_threads_as_torch_uses(self, count, threads):
        threads(count)
        recorder = Recorder(at_work=0.02)
        team.run(recorder.kernel, 10 * team.BLOCKS_PER_THREAD)
        assert len(recorder.by) == count

    def test_small_jobs_stay_in_the_caller_s_thread(self, threads):
        threads(4)
        recorder = Recorder(at_work=0.02)
        team.run(recorder.kernel, 2 * team.BLOCKS_PER_THREAD - 1)
        assert recorder.by == {threading.get_ident()}

    def test_several_callers_at_once(self, threads):
        threads(2)
        recorders = [Recorder() for _ in range(4)]
        in_threads(lambda recorder: team.run(recorder.kernel, 1000), recorders)
        assert all(sorted(r.done) == list(range(1000)) for r in recorders)


@pytest.mark.parametrize("when", ["at work", "waiting"])
def test_an_interrupt_waits_for_the_others_which_write_into_the_caller_s_memory(monkeypatch, threads, when):
    monkeypatch.setattr(team, "_openmp", lambda: None)
    threads(2)
    recorder, begun, caller = Recorder(at_work=0.01), threading.Event(), threading.get_ident()

    def call(job):
        if threading.get_ident() == caller:
            begun.wait()
            if when == "at work":
                raise KeyboardInterrupt
            return
        begun.set()
        recorder.kernel.call(job)

    interrupts = [KeyboardInterrupt] if when == "waiting" else []

    def wait(calls):
        if interrupts:
            raise interrupts.pop()
        return concurrent.futures.wait(calls)

    monkeypatch.setattr(team, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        team.run(team.Kernel(0, call, None), 1000)
    assert sorted(recorder.done) == list(range(1000))


@pytest.mark.usefixtures("workers")
def test_one_thread_leaves_the_number_of_threads_as_it_was(threads):
    threads(3)
    with team.one_thread():
        torch.ones(100_000).exp()
    assert torch.get_num_threads() == 3
