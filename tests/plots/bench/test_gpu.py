"""The calls of the first day with a GPU, on the CPU in toy sizes: that none of its minutes goes to a typing error."""

import json
import time
from pathlib import Path

import click
import fewbit.plots
import pytest
from click.testing import CliRunner
from fewbit.cli.main import fewbit as main_command
from fewbit.plots.bench.gpu import benches, calls, checks, plugin, suite, tables, trainings
from fewbit.plots.bench.gpu.apart import MODULE, Part, run_part
from fewbit.plots.bench.gpu.record import Record

RESULTS = Path(fewbit.plots.__path__[0]) / "results"
ABOUT = {"device": "cpu", "commit": "abc", "toy": True, "packages": {}}


def called(*arguments):
    outcome = CliRunner().invoke(calls.command, [str(one) for one in arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


@pytest.mark.parametrize(
    "name", ["threads", "two streams", "misaligned", "first use in a graph", "noise in graphs", "formulas", "layers"]
)
def test_a_check(name):
    *_, last = checks.CHECKS[name]("cpu")
    assert last["ok"], last


def test_a_check_says_what_failed(monkeypatch):
    monkeypatch.setattr(checks, "_at_odd_address", lambda codes: codes + 1)
    *_, last = checks.misaligned("cpu")
    assert not last["ok"]
    assert last["PerGroup"] == {"same": False}


@pytest.mark.deep
def test_checks_are_collected_and_not_made_again(tmp_path):
    path = tmp_path / "gpu-1.json"
    said = called("checks", "--toy", "-o", path, "--only", "overhead")
    row = json.loads(path.read_text())["rows"]["overhead"]
    assert row["state"] == "ok"
    assert row["microseconds"]["torch's gelu"] > 0
    assert "overhead" in said.splitlines()[-1]
    begun = time.monotonic()
    called("checks", "--toy", "-o", path, "--only", "overhead")
    assert json.loads(path.read_text())["rows"]["overhead"] == row
    assert time.monotonic() - begun < 5  # no process began


def test_a_bench_s_report_is_a_part(tmp_path):
    script = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('[1]'); raise SystemExit(1)"
    row = run_part(Part("bench", ("-c", script), report=True), time.monotonic() + 100)
    assert (row["state"], row["report"]) == ("failed", [1])


@pytest.mark.parametrize("call", benches.BENCHES)
def test_benches_take_their_arguments(call, tmp_path):
    for part in benches.parts_of(call, tmp_path, 60, toy=False):
        words = [*part.arguments[2:], *(("-o", str(tmp_path / "report.json")) if part.report else ())]
        command = calls.command if part.arguments[:2] == MODULE else main_command
        while isinstance(command, click.Group):
            command = command.get_command(None, words.pop(0))
        command.make_context("bench", words)  # raises where an option is wrong


def test_counters_are_read_from_ncu():
    text = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","quantize(float*)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","91.25"
"0","7","quantize(float*)","gpu__time_duration.sum","ns","12,345"
"""
    assert benches.counted(text) == {"0 quantize": {"dram": 91.25, "us": 12.35}}
    assert benches.counted("no kernel") == {}


@pytest.mark.parametrize("way", ["eager", "checkpoints", "L2, gated parts"])
def test_a_training(way, tmp_path, monkeypatch):
    monkeypatch.setenv(trainings.LOCK, str(tmp_path / "lock"))
    first, _, last = trainings.train(trainings.problem_of("layer", small=True), way, "cpu")
    assert first["losses"] == last["losses"][:2]
    assert last["losses"][-1] < last["losses"][0]
    assert last["ms"] > 0


def test_every_way_prepares_a_model_of_its_problems():
    for way in trainings.WAYS.values():
        for problem in (trainings.problem_of(name, small=True) for name in way.problems):
            way.prepare(trainings.model_of(problem, "cpu"), trainings.data_of(problem, "cpu"))


def test_ways_are_compared_with_eager():
    row = {"losses": [2.0, 1.0], "static": 2**30, "first step s": 1.0}
    rows = {"model: eager": {**row, "peak": 5 * 2**30, "ms": 10.0}, "model: L2": {**row, "peak": 2 * 2**30, "ms": 11.0}}
    *_, last = trainings.lines({**rows, "model: killed": {"state": "broken off"}})
    assert last == ("model: L2", "2.00", "1.00", "0.25", "0.00", "11.0", "1.10", "1.0", "1.0000 (2)")


def test_the_page_has_the_tables_of_the_files():
    text = (RESULTS / "gpu.md").read_text()
    assert tables.page(text, RESULTS) == text


def test_what_is_not_measured_says_so(tmp_path):
    marks = "".join(f"<!-- [start:{name}] -->\nold\n<!-- [end:{name}] -->\n" for name in tables.SECTIONS)
    record = Record(tmp_path / "gpu-4.json", {**ABOUT, "when": "2026-11-26T00:00", "python": "3.12"})
    record.add("layer: eager", {"state": "ok", "losses": [1.0], "first step s": 1, "peak": 2, "reserved": 2, "kept": 1})
    record.add("layer: L2", {"state": "broken off"})
    text = tables.page(marks, tmp_path)
    assert text.count("Not measured yet.") == len(tables.SECTIONS) - 1
    assert "| L2 | not measured |" in text
    assert "old" not in text


@pytest.mark.deep
def test_tests_are_run(tmp_path):
    called("tests", "--toy", "--sample", 0.1, "-o", tmp_path / "gpu-2.json")
    row = json.loads((tmp_path / "gpu-2.json").read_text())["rows"]["tests, a tenth"]
    assert row["state"] == "ok"
    assert row.get("passed", 0) + row.get("skipped", 0) >= 2


def test_the_files_of_gpu_tests_are_found():
    files = suite.files_of_gpu_tests()
    assert "tests/gpu/test_cuda.py" in files  # by the marker
    assert "tests/runtime/backends/test_rounding.py" in files  # by the fixture
    assert len(files) < 30


def test_without_xdist_tests_run_in_one_process(monkeypatch):
    assert "-n" in suite.parts(1.0, 8, False)[0][0].arguments
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    assert all("-n" not in stage[0].arguments for stage in suite.parts(1.0, 8, False))


def test_a_tenth_of_the_tests_has_one_of_each_function_and_the_rest_all_others():
    names = [f"a.py::test_{function}[{i}]" for function in range(20) for i in range(50)]
    tenth, rest = plugin.chosen(names, 0.1), plugin.chosen(names, -0.1)
    assert all(one != other for one, other in zip(tenth, rest, strict=True))
    assert {name.split("[")[0] for name, one in zip(names, tenth, strict=True) if one} == {
        name.split("[")[0] for name in names
    }
    assert 50 < sum(tenth) < 200
    assert all(plugin.chosen(names, 1.0))


class TestApart:
    @pytest.mark.deep
    def test_a_part_that_is_broken_off_keeps_what_it_said(self):
        script = "import time; print('{\"passed\": 3}', flush=True); time.sleep(60)"
        row = run_part(Part("long", ("-c", script), seconds=3), time.monotonic() + 100)
        assert (row["state"], row["passed"]) == ("broken off", 3)

    def test_an_error_is_a_row(self):
        row = run_part(Part("wrong", ("-c", "print('no JSON'); raise ValueError('why')")), time.monotonic() + 100)
        assert row["state"] == "failed"
        assert row["errors"][-1] == "ValueError: why"

    def test_without_time_nothing_begins(self):
        assert run_part(Part("late", ("-c", "")), time.monotonic())["state"] == "not begun"


def test_a_record_goes_on_on_the_same_commit_only_and_a_broken_file_is_begun_anew(tmp_path):
    path = tmp_path / "there" / "gpu.json"
    Record(path, ABOUT).add("one", {"state": "ok", "loss": float("nan")})
    assert Record(path, ABOUT).rows == {"one": {"state": "ok", "loss": "nan"}}
    assert Record(path, {**ABOUT, "commit": "def"}).rows == {}
    assert Record(path, ABOUT, fresh=True).rows == {}
    path.write_text("{")
    assert Record(path, ABOUT).rows == {}


def test_what_is_wrong_stands_below_the_table(tmp_path):
    record = Record(tmp_path / "gpu.json", ABOUT)
    failure = {"count": 7, "message": "no launch", "tests": ["test_a"]}
    record.add("tests", {"state": "failed", "passed": 3, "failed": 7, "failures": [failure]})
    record.add("noise", {"state": "failed", "ok": False, "PerGroup": {"fresh": False}, "gated": "ok"})
    lines = list(calls.lines_of(record))
    assert "tests: 7 x no launch  (test_a)" in lines
    assert 'noise: PerGroup: {"fresh": false}' in lines
    assert not any("gated" in line for line in lines)
