import json


def test_a_report_is_drawn(run, tmp_path):
    rows = [{"who": "copy", "which": "copy", "dtype": "bfloat16", "n": n, "bits": 0, "gbs": 1.0} for n in (8, 16)]
    (tmp_path / "cuda.json").write_text(json.dumps({"device": "Some GPU", "rows": rows}))
    assert run("plot", "throughput", tmp_path / "cuda.json", "-o", tmp_path / "t.png").status == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
