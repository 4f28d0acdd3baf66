"""Mixed precision in two processes: each shares out its own bits, and the weights stay one."""

from pathlib import Path

from processes import said_by_two

SCRIPT = Path(__file__).parents[2] / "support" / "parallel_precision.py"


def test_two_processes(tmp_path):
    assert said_by_two(SCRIPT, tmp_path / "meeting") == ["one model\n"] * 2
