import io
import itertools
import logging
import sys
import time

from fewbit.cli import progress
from fewbit.cli.progress import with_clock, with_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_on_standard_error_only(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(with_progress(iter("abc"), 3, "solving")) == list("abc")
    assert "solving" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_a_pipe_shows_nothing(monkeypatch, capsys):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert list(with_progress(iter("abc"), 3, "solving")) == list("abc")
    assert pipe.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_a_clock_runs_on_a_terminal_while_work_takes_seconds(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert with_clock(lambda seconds: time.sleep(seconds) or "done", 1.2, label="solving") == "done"
    assert "\rsolving: 1 s" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")


def test_what_is_compiled_meanwhile_has_a_line_of_its_own(monkeypatch):
    log = logging.getLogger("fewbit.compiling")
    before = log.propagate, [*log.handlers]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in with_progress(range(2), 2, "solving"):
        log.warning("compiling a kernel")
    with_clock(log.warning, "compiling another", label="solving")
    assert "\r\x1b[Kcompiling a kernel\n" in terminal.getvalue()
    assert "\r\x1b[Kcompiling another\n" in terminal.getvalue()
    assert (log.propagate, log.handlers) == before


def test_a_pipe_shows_a_line_where_work_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    assert len([None for _ in with_progress(map(time.sleep, (0.03, 0.03)), 2, "solving")]) == 2
    labels = map("part {}".format, itertools.count())
    assert with_clock(lambda: time.sleep(0.2) or "done", label=labels.__next__) == "done"
    told = [line.split(",")[0].split(": ") for line in capsys.readouterr().err.splitlines()]
    assert told[:2] == [["solving", "1 of 2"], ["solving", "2 of 2"]] and told[2][0] == "part 0"


def test_a_pipe_has_the_first_line_of_a_clock_soon_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with progress.clock("loading torch", soon=0.01):
        while not pipe.getvalue():
            time.sleep(0.01)
    assert pipe.getvalue() == "loading torch: 0 s\n"


def test_counted_steps_are_a_bar_or_lines(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    for stream, said in ((Terminal(), "100%"), (io.StringIO(), "training: 2 of 2, 0 s")):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.counted_steps(2, "training") as advance:
            advance()
            advance()
        assert said in stream.getvalue()
