import io
import sys

from fewbit.cli.progress import with_progress


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
