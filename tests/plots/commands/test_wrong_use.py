"""Wrong use of `fewbit plot` is told in one line, and leaves nothing."""

import os
import shlex

import pytest

STUDIES = ("training --method blpa", "gradient-noise", "blpa-memory", "vquant-accuracy", "vquant-lstm")
FILES = {"empty.json": "", "half.json": "{", "list.json": "[]", "results.json": "{}", "rows.json": '{"rows": []}'}
FILES |= {"numbers.json": '{"rows": 1, "device": "x"}'}
FILES |= {f"study-{i}.json": f'{{"study": "{name}"}}' for i, name in enumerate(STUDIES)}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("training --steps 0", "steps must be 1 or more"),
        ("training --seeds 1", "1 is not in the range"),
        ("training --bits 9", "bits"),
        ("training --model gpt3", "'gpt3'"),
        ("training --input results.json --steps 5 --control", "leave out --steps, --control"),
        ("training --input missing.json", "cannot read missing.json"),
        ("training --input results.json", "results.json: not what `fewbit plot training` writes"),
        ("training -o figure.gif", "accepted: .png, .svg, .pdf"),
        ("training -o missing/figure.png", "there is no folder"),
        ("training --method exact", "'blpa'"),
        ("training --method actnn --steps 0", "0 is not in the range"),
        ("training --method actnn --seeds 1", "1 is not in the range"),
        ("training --method actnn --task images", "'images'"),
        ("training --method actnn --input missing.json", "cannot read missing.json"),
        ("training --method actnn --input results.json", "not what `fewbit plot training --method actnn` writes"),
        ("training --method actnn -o figure.gif", "accepted: .png, .svg, .pdf"),
        ("training --method blpa --depth 12", "depth is 9n + 2"),
        ("adaptation --adapt 1", "1 is not in the range"),
        ("adaptation --bits 9", "9"),
        ("adaptation --input results.json --seeds 3", "leave out --seeds"),
        ("memory --input results.json", "not what `fewbit bench glu` or `fewbit plot memory` writes"),
        *((f"throughput {name}.json", "fewbit: ") for name in ("missing", "half", "list", "rows", "numbers")),
        ("variance --bits 9", "9 is not in the range"),
        ("variance --draws 1", "1 is not in the range"),
        ("variance --input results.json --draws 3", "leave out --draws"),
        ("variance --input results.json", "results.json: not what `fewbit plot variance` writes"),
        ("variance -o figure.gif", "accepted: .png, .svg, .pdf"),
        ("vquant-lstm --input missing.json", "cannot read missing.json"),
        ("vquant-memory --measure ResNet-19", "no network 'ResNet-19'; there are AlexNet"),
        ("vquant-accuracy --seeds 0", "0 is not in the range"),
        *(
            (f"{study} --input {name}.json", f"{name}.json: not what `fewbit plot {study}` writes")
            for i, study in enumerate(STUDIES)
            for name in ("empty", "list", "results", f"study-{i}")
        ),
    ],
)
def test_is_told_in_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    outcome = run("plot", *shlex.split(command), *(() if " -o " in command else ("-o", "figure.png")))
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err
    assert set(os.listdir(tmp_path)) == set(FILES)
