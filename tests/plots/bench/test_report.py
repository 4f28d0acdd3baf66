"""What all benches share on the command line: options, checks before the measurement, the report."""

import json
import shlex

import click
import pytest
import torch
from fewbit.cli.main import fewbit
from fewbit.plots.bench.report import Machine, Report, bench_command, rounds_option, this_machine


@pytest.fixture
def measured(monkeypatch):
    """The options of each measurement; `fewbit bench toy` measures nothing, and says what it was asked for."""
    found = []

    @bench_command("toy", threads=True, device=True)
    @rounds_option(7)
    @click.option("--failed", is_flag=True)
    def toy(**options):
        found.append({**options, "threads": torch.get_num_threads()})
        return Report({"rounds": options["rounds"]}, ["a line", "another"], failed=options["failed"])

    bench = fewbit.get_command(click.Context(fewbit), "bench")
    monkeypatch.setattr(type(bench), "get_command", lambda self, ctx, name: bench if name == "bench" else toy)
    monkeypatch.setitem(bench.lazy, "toy", "A toy.")
    return found


def test_lines_are_printed_and_the_file_holds_the_json_that_json_prints(run, measured, tmp_path):
    assert run("bench", "toy").out == "a line\nanother\n"
    assert measured[0]["rounds"] == 7
    path = tmp_path / "toy.json"
    outcome = run("bench", "toy", "--rounds", 3, "--json", "-o", path)
    assert json.loads(outcome.out) == {"rounds": 3}
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    assert path.read_text() == outcome.out


def test_a_file_that_cannot_be_written_is_told_before_the_measurement(run, measured):
    outcome = run("bench", "toy", "-o", "/no/such/folder/toy.json")
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "cannot write" in outcome.err
    assert measured == []


def test_threads_are_set_for_the_measurement(run, measured):
    assert run("bench", "toy", "--threads", 3).status == 0
    assert measured == [{"rounds": 7, "failed": False, "device": "cpu", "threads": 3}]


def test_a_gpu_that_is_not_there_is_told_before_the_measurement(run, measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run("bench", "toy", "--device", "cuda")
    assert (outcome.status, outcome.err) == (2, "fewbit: no CUDA GPU here: torch.cuda.is_available() is False\n")
    assert measured == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run("bench", "toy", "--device", "cuda").status == 0
    assert measured[0]["device"] == "cuda"


def test_a_failure_is_reported_whole_and_then_by_the_status(run, measured, tmp_path):
    outcome = run("bench", "toy", "--failed", "-o", tmp_path / "toy.json")
    assert (outcome.status, outcome.out) == (1, "a line\nanother\n")
    assert (tmp_path / "toy.json").exists()


def test_the_machine(monkeypatch):
    torch.set_num_threads(1)
    here = this_machine()
    assert here == Machine(torch.__version__, 1)
    assert (here.device, here.where) == ("cpu", "1 threads")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    gpu = this_machine("cuda")
    assert (gpu.device, gpu.where) == ("Some GPU", "Some GPU")


def test_every_bench_writes_a_file_and_begins_its_help_by_its_line():
    bench = fewbit.get_command(click.Context(fewbit), "bench")
    assert set(bench.list_commands(click.Context(bench))) == set(bench.lazy)
    for name, line in bench.lazy.items():
        found = bench.get_command(click.Context(bench), name)
        options = {option for p in found.params for option in p.opts}
        assert {"-o", "--output"} <= options
        assert "--json" in options or name == "kernels"
        assert found.name == name and found.help.splitlines()[0] == line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("level", "no command 'level'; did you mean levels"),
        ("activation glu", "no module 'glu' to measure; nearest: GELU"),
        ("activation gelu --dtype int8", "dtype must be one of float32"),
        ("activation gelu --shape 4x0", "not a shape such as 4096x4096"),
        ("activation gelu --shape big", "not a shape such as 4096x4096"),
        ("activation gelu --bits 9", "bits must be a whole number from 1 to 8"),
        ("activation gelu -o /no/such/folder/bench.json", "cannot write"),
        ("activation gelu --bars", "--bars measures activations of its own: name none"),
        ("compiled --model Lama", "Lama"),
        ("compiled --variant fewbit-7", "fewbit-7"),
        ("compiled --layers 0", "0 is not in the range"),
        ("compiled --options eager {}", "eager is a variant already"),
        ("compiled --options mine [1]", "no mapping in JSON"),
        ("compiled --options mine '{\"bit\": 4}'", "'bit' is no option of the backend fewbit"),
        ("glu-bits --bits 5", "5"),
        ("glu-bits --draws 1", "1"),
        ("glu-bits --steps 0", "0 is not in the range"),
        ("kernels --dtype int8", "no kernels for the dtype 'int8'; there are float32, float16, bfloat16, float64"),
        ("kernels gelou", "unknown activation 'gelou'; nearest: gelu"),
        ("kernels --bits 9", "9"),
        ("kernel-times --elements 8", "8 is not in the range"),
        ("kernel-times --dtype float64", "float64"),
        ("kernel-times --rounds 0", "0 is not in the range"),
        ("levels --batch 0", "0 is not in the range"),
        ("levels --image-size 32", "32 is not in the range"),
        ("levels --steps x", "'x' is not a valid integer"),
        ("outliers --bits 1", "1"),
        ("outliers --bits 9", "9"),
        ("outliers --ratio 1.5", "1.5"),
        ("preact --bits 9", "9"),
        ("quantizers --bits 9", "9"),
        ("quantizers --dtype float64", "float64"),
        ("quantizers --mib 0", "0 is not in the range"),
        ("quantizers --device tpu", "tpu"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(run, command, said):
    outcome = run("bench", *shlex.split(command))
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert said in outcome.err
