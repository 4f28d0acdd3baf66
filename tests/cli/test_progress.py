import io
import sys
import time

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
