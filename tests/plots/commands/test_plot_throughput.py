import json

import pytest


def test_a_report_is_drawn(run, tmp_path):
    rows = [{"who": "copy", "which": "copy", "dtype": "bfloat16", "n": n, "bits": 0, "gbs": 1.0} for n in (8, 16)]
    (tmp_path / "cuda.json").write_text(json.dumps({"device": "Some GPU", "rows": rows}))
    assert run("plot", "throughput", tmp_path / "cuda.json", "-o", tmp_path / "t.png").status == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": []}', '{"rows": 1, "device": "x"}'])
def test_what_is_no_report_is_told_in_one_line(run, tmp_path, content):
    if content is not None:
        (tmp_path / "cuda.json").write_text(content)
    outcome = run("plot", "throughput", tmp_path / "cuda.json", "-o", tmp_path / "t.png")
    assert outcome.status == 2
    assert outcome.err.startswith("fewbit: ") and outcome.err.count("\n") == 1
