import dataclasses
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight, solve
from fewbit.fewbit_gen.interval import solve_interval
from fewbit.fewbit_gen.moments import Moments
from fewbit.fewbit_gen.shared import solve_shared
from fewbit.plots.bench import solve as bench
from fewbit.plots.bench.solve import BUILD, FEWBIT, KMEANS1D, PLAIN, RUPTURES, TASKS, Measurement, Task

SMALL = [dataclasses.replace(task, n=task.n and 300, K=task.n and 5) for task in TASKS]
INSTALLED = [task for task in SMALL if task.solver not in (KMEANS1D, RUPTURES) or bench.find_spec(task.solver)]


class Deadly:
    """Whoever unpickles this dies."""

    def __reduce__(self):
        return os._exit, (9,)


def moments(name="gelu", weight="uniform:-10,10", cells=200):
    return Moments.of(parse_activation(name), parse_weight(weight), cells)


@pytest.mark.parametrize("K", [1, 2, 5, 16])
@pytest.mark.parametrize("name", ["gelu", "tanh", "selu"])
def test_the_plain_programme_finds_what_the_solvers_find(name, K):
    m = moments(name)
    plain = m.edges[bench.plain_programme(m.prefix, K)]
    np.testing.assert_allclose(bench.interval_error(m, plain), bench.interval_error(m, solve_interval(m, K)), rtol=1e-9)


def test_the_plain_programme_is_the_best_of_all_cuts_and_takes_no_more_levels_than_cells():
    m = moments(cells=9)
    best = min(bench.interval_error(m, m.edges[list(cuts)]) for cuts in itertools.combinations(range(1, 9), 3))
    assert bench.interval_error(m, m.edges[bench.plain_programme(m.prefix, 4)]) == pytest.approx(best, rel=1e-12)
    assert bench.plain_programme(moments(cells=4).prefix, 16).size <= 3


@pytest.mark.parametrize("weight", ["uniform:-10,10", "normal:0,1"])
def test_errors_are_what_the_solvers_say(weight):
    m = moments(weight=weight)
    levels = solve_shared(m, 4)
    w, fw, _ = m.cells
    value = fw[w > 0] / w[w > 0]
    expected = (w[w > 0] * np.min((value[:, None] - levels) ** 2, axis=1)).sum()
    assert bench.shared_error(m, levels) == pytest.approx(expected, rel=1e-9)
    boundaries = solve(parse_activation("gelu"), 2, "interval", weight, certify=False).boundaries
    fine = moments(weight=weight, cells=4096)
    found = bench.interval_error(fine, boundaries)
    assert found == pytest.approx(solve("gelu", 2, "interval", weight, certify=False).error, rel=1e-9)


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_all_who_solve_a_problem_reach_the_same_error(kind):
    tasks = [t for t in INSTALLED if t.what == "solver" and t.kind == kind]
    errors = {t.solver: bench.measure(t, rounds=1).error for t in tasks}
    assert {FEWBIT, PLAIN} <= set(errors)
    assert max(errors.values()) == pytest.approx(min(errors.values()), rel=1e-9)


@pytest.mark.deep
def test_a_measurement_is_taken_in_a_process_of_its_own():
    ballast = np.ones(2**26)  # half a gigabyte that is not the measured process's
    (measured,) = bench.bench_solve([SMALL[-1]], rounds=3)
    assert measured.task == SMALL[-1]
    assert measured.rounds == 3
    if sys.platform == "linux":
        assert 2**24 < measured.peak_bytes < ballast.nbytes
    assert measured.met


def test_the_compiler_as_a_whole_is_measured():
    measured = bench.measure(TASKS[1], rounds=2)
    assert measured.error == solve("gelu", 3, "shared", certify=False).error


def test_who_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda _: None)
    tasks = [task for task in SMALL if task.solver in (KMEANS1D, RUPTURES)]
    assert [m.note for m in bench.bench_solve(tasks)] == ["not installed"] * len(tasks)


@pytest.mark.parametrize(
    ("kind", "n", "note", "met"),
    [("shared", 10**14, "out of memory", False), (Deadly(), 64, "its process died", None)],
    ids=["too little memory", "a process that dies"],
)
def test_what_ended_a_measurement_is_told(kind, n, note, met):
    (measured,) = bench.bench_solve([Task("solver", kind, FEWBIT, n, 4, bar_ms=1.0 if met is False else None)])
    assert (measured.note, measured.ms, measured.met) == (note, None, met)


def test_a_fault_in_the_process_is_raised_here():
    with pytest.raises(KeyError, match="nobody"):
        list(bench.bench_solve([Task("solver", "shared", "nobody", 64, 4)]))


def test_a_bar_is_met_only_if_all_of_them_are():
    task = Task("solver", "shared", bar_ms=10, bar_bytes=100)
    cases = {(9, 99): True, (10, 100): True, (11, 99): False, (9, 101): False, (None, 50): False, (9, None): False}
    for (ms, peak), met in cases.items():
        assert Measurement(task, ms=ms, peak_bytes=peak).met is met
    assert Measurement(Task("solver", "shared"), ms=1.0).met is None


def test_the_bars_are_those_that_were_set():
    bars = {(t.what, t.kind, t.n, t.K): (t.bar_ms, t.bar_bytes) for t in (*TASKS, BUILD) if t.bar_ms}
    assert bars == {
        ("solve", "interval", None, 8): (50, None),
        ("solve", "shared", None, 8): (50, None),
        ("solve", "stochastic", None, 8): (50, None),
        ("solver", "interval", 10_000, 16): (500, None),
        ("solver", "shared", 1_000_000, 256): (5_000, 4 * 2**30),
        ("solver", "stochastic", 1_000_000, 256): (1_000, 4 * 2**30),
        ("build", None, None, None): (300_000, None),
    }


def test_torch_is_not_needed():
    code = "import sys; sys.modules['torch'] = None; import fewbit.plots.bench.solve"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


PRINTED = [
    Task("solver", "shared", FEWBIT, 1234, 5, bar_ms=1e6, bar_bytes=2**40),
    Task("solver", "shared", PLAIN, 300, 5, bar_ms=1e-6),
    Task("solver", "shared", KMEANS1D, 300, 5),
]


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr(bench, "TASKS", PRINTED)
    monkeypatch.setattr(bench, "find_spec", lambda _: None)


@pytest.mark.deep
def test_the_compiler_is_measured_and_reported(run, small_tasks, tmp_path):
    path = tmp_path / "solve.json"
    outcome = run("bench", "solve", "--rounds", 2, "-o", path)
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    heading, columns, fewbit, plain, kmeans1d = outcome.out.splitlines()
    assert heading.startswith("numpy ") and heading.split()[-1] in ("core", "cores")
    assert columns.split()[:6] == ["what", "kind", "by", "n", "K", "ms"]
    assert fewbit.split()[:5] == ["solver", "shared", "fewbit", "1,234", "5"]
    assert fewbit.endswith("1,000,000 ms, 1,048,576 MiB  yes")
    assert plain.startswith("solver  shared  plain O(n^2 K)") and plain.endswith("0 ms   no")
    assert kmeans1d.endswith("not installed")
    first, _, last = json.loads(path.read_text())["measurements"]
    values = [first[field] for field in ("what", "kind", "solver", "n", "K", "rounds", "met")]
    assert values == ["solver", "shared", "fewbit", 1234, 5, 2, True]
    assert (last["ms"], last["note"], last["met"]) == (None, "not installed", None)


def test_the_build_is_measured_if_asked_for(run, monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "bench_solve", lambda tasks, rounds: measured.extend(tasks) or [])
    assert run("bench", "solve").status == run("bench", "solve", "--build").status == 0
    assert measured == [*bench.TASKS, *bench.TASKS, bench.BUILD]
