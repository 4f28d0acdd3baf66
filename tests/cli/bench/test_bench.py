import json

import pytest
import torch
from fewbit.fewbit_gen import bench
from fewbit.fewbit_gen.bench import FEWBIT, KMEANS1D, PLAIN, Task

SMALL = ["--shape", "9x7", "--rounds", "1"]
TASKS = [
    Task("solver", "shared", FEWBIT, 1234, 5, bar_ms=1e6, bar_bytes=2**40),
    Task("solver", "shared", PLAIN, 300, 5, bar_ms=1e-6),
    Task("solver", "shared", KMEANS1D, 300, 5),
]


def test_the_activations_named_are_measured_and_printed(run):
    outcome = run("bench", "activation", "gelu", "Softplus", *SMALL)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0].endswith("threads, 9x7")
    assert lines[1].split()[:4] == ["activation", "dtype", "bits", "pass"]
    measured = [tuple(line.split()[:4]) for line in lines[2:8]]
    passes = ("forward", "backward", "both")
    assert measured == [(name, "float32", "3", which) for name in ("GELU", "Softplus") for which in passes]
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


def test_all_that_has_a_bar_is_measured(run):
    outcome = run("bench", "activation", "--bars", *SMALL, "--json")
    report = json.loads(outcome.out)
    names, dtypes = ("GELU", "SiLU", "Tanh", "Sigmoid"), ("float32", "bfloat16")
    measured = [(t["dtype"], t["activation"], t["bits"], t["which"]) for t in report["timings"]]
    assert measured == [(d, name, bits, "both") for d in dtypes for name in names for bits in (1, 2, 3, 4)]
    assert [(o["dtype"], o["activation"], o["bar_us"]) for o in report["overheads"]] == [
        (d, name, 30) for d in dtypes for name in names
    ]


def test_bars_are_printed_where_there_are_some(run, monkeypatch):
    monkeypatch.setattr("fewbit.runtime.bench.BAR_SHAPE", (9, 7))
    monkeypatch.setattr("fewbit.runtime.bench.BARS", {"GELU": 1e9})
    lines = run("bench", "activation", "gelu", "silu", *SMALL).out.splitlines()
    assert "bar" in lines[1].split() and "met" in lines[1].split()
    assert [("1000000000.00" in line, "yes" in line) for line in lines[2:8]] == [(False, False)] * 2 + [
        (True, True),
        *[(False, False)] * 3,
    ]


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr(bench, "TASKS", TASKS)
    monkeypatch.setattr(bench, "find_spec", lambda _: None)


def test_the_compiler_is_measured_and_printed(run, small_tasks):
    outcome = run("bench", "solve", "--rounds", 1)
    assert (outcome.status, outcome.err) == (0, "")
    heading, columns, fewbit, plain, kmeans1d = outcome.out.splitlines()
    assert heading.startswith("numpy ") and heading.split()[-1] in ("core", "cores")
    assert columns.split()[:6] == ["what", "kind", "by", "n", "K", "ms"]
    assert fewbit.split()[:5] == ["solver", "shared", "fewbit", "1,234", "5"]
    assert fewbit.endswith("1,000,000 ms, 1,048,576 MiB  yes")
    assert plain.startswith("solver  shared  plain O(n^2 K)") and plain.endswith("0 ms   no")
    assert kmeans1d.endswith("not installed")


def test_the_measurements_of_the_compiler_as_json(run, small_tasks, tmp_path):
    path = tmp_path / "solve.json"
    outcome = run("bench", "solve", "--rounds", 2, "--json", "-o", path)
    report = json.loads(outcome.out)
    assert report == json.loads(path.read_text())
    assert outcome.err == f"wrote {path}\n"
    first, _, last = report["measurements"]
    told = [first[field] for field in ("what", "kind", "solver", "n", "K")]
    assert told == ["solver", "shared", "fewbit", 1234, 5]
    assert first["met"] is True and first["rounds"] == 2 and first["ms"] > 0 and first["error"] > 0
    assert (last["ms"], last["note"], last["met"]) == (None, "not installed", None)


def test_the_build_is_measured_if_asked_for(run, monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "bench_solve", lambda tasks, rounds: measured.extend(tasks) or [])
    assert run("bench", "solve").status == run("bench", "solve", "--build").status == 0
    assert measured == [*bench.TASKS, *bench.TASKS, bench.BUILD]


def test_where_the_measurements_go_is_checked_first(run, monkeypatch):
    monkeypatch.setattr(bench, "bench_solve", lambda *_: pytest.fail("measured"))
    outcome = run("bench", "solve", "-o", "/no/such/folder/solve.json")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["glu"], "no module 'glu' to measure; nearest: GELU"),
        (["gelu", "--dtype", "int8"], "dtype must be one of"),
        (["gelu", "--shape", "4x0"], "not a shape such as 4096x4096"),
        (["gelu", "--shape", "big"], "not a shape such as 4096x4096"),
        (["gelu", "--bits", "9"], "bits must be a whole number from 1 to 8"),
        (["gelu", "-o", "/no/such/folder/bench.json"], "cannot write"),
        (["gelu", "--bars"], "--bars measures activations of its own: name none"),
    ],
)
def test_bad_use_is_one_line_and_status_2(run, arguments, said):
    outcome = run("bench", "activation", *arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert said in outcome.err and outcome.err.count("\n") == 1
