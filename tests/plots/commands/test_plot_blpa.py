import json

import pytest
from fewbit.cli.main import main

SMALL = ["--depth", "11", "--width", "4", "--steps", "2", "--batch", "16"]


def run(capsys, command, *arguments):
    status = main(["plot", *command.split(), *map(str, arguments)])
    return status, capsys.readouterr()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command, options, message",
    [
        ("training --method blpa", [*SMALL, "--seeds", 2], "naive, 8 bits"),
        ("gradient-noise", [*SMALL, "--batches", 2], "layers above 1/10"),
    ],
)
def test_runs_writes_and_draws_again(capsys, tmp_path, command, options, message):
    picture, again = tmp_path / "a.png", tmp_path / "b.png"
    status, out = run(capsys, command, *options, "-o", picture)
    assert status == 0 and message in out.out
    numbers = picture.with_suffix(".json")
    assert json.loads(numbers.read_text())["study"] == command
    status, second = run(capsys, command, "--input", numbers, "-o", again)
    assert status == 0 and second.out == out.out
    assert picture.read_bytes() == again.read_bytes()


def test_memory_is_drawn_from_the_shipped_numbers(capsys, tmp_path, monkeypatch):
    import fewbit.plots

    shipped = f"{fewbit.plots.__path__[0]}/results/blpa-memory.json"
    status, out = run(capsys, "blpa-memory", "--input", shipped, "-o", tmp_path / "a.png")
    assert status == 0
    assert "W + 1 = 3" in out.out
    (row,) = (line.split() for line in out.out.splitlines() if line.split()[:2] == ["164", "16"])
    assert row[2:8] == ["880", "4,993", "5.7", "688", "2,522", "3.7"]  # the row that is furthest from the paper's
