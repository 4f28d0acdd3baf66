import json

import pytest
import torch

SMALL = ["--shape", "9x7", "--rounds", "1"]


def test_the_activations_named_are_measured_and_printed(run):
    outcome = run("bench", "activation", "gelu", "Softplus", *SMALL)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert "float32 9x7" in lines[0]
    assert lines[1].split()[:3] == ["activation", "bits", "pass"]
    measured = [tuple(line.split()[:3]) for line in lines[2:8]]
    passes = ("forward", "backward", "both")
    assert measured == [(name, "3", which) for name in ("GELU", "Softplus") for which in passes]
    assert [line.split()[0] for line in lines[-2:]] == ["GELU", "Softplus"]


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_json_on_standard_output_is_what_the_file_holds(run, tmp_path):
    path = tmp_path / "bench.json"
    outcome = run("bench", "activation", "silu", *SMALL, "--bits", 2, "--threads", 1, "--json", "-o", path)
    report = json.loads(outcome.out)
    assert report == json.loads(path.read_text())
    assert report["threads"] == 1
    assert [t["bits"] for t in report["timings"]] == [2, 2, 2]
    assert outcome.err == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["glu"], "no module 'glu' to measure; nearest: GELU"),
        (["gelu", "--dtype", "int8"], "dtype must be one of"),
        (["gelu", "--shape", "4x0"], "not a shape such as 4096x4096"),
        (["gelu", "--shape", "big"], "not a shape such as 4096x4096"),
        (["gelu", "--bits", "9"], "bits must be a whole number from 1 to 8"),
        (["gelu", "-o", "/no/such/folder/bench.json"], "cannot write"),
    ],
)
def test_bad_use_is_one_line_and_status_2(run, arguments, said):
    outcome = run("bench", "activation", *arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert said in outcome.err and outcome.err.count("\n") == 1
