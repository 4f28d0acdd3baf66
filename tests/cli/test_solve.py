import json
import os

import fewbit
import numpy as np
import pytest
from fewbit.cli import solve as solve_module
from fewbit.fewbit_gen import weights
from fewbit.runtime.backends.cuda.codegen import cuda_header
from fewbit.tables.exporters import SUFFIXES, export
from fewbit.tables.table import table_to_dict


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], {"bits": 3, "kind": "shared", "weight": "uniform:-10,10"}),
        (["--bits", "2", "--kind", "interval"], {"bits": 2, "kind": "interval"}),
        (["--levels", "5"], {"levels": 5}),
        (["--weight", "normal:0,1"], {"weight": "normal:0,1"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_json_prints_the_fields_of_the_table_and_nothing_else(run, options, arguments):
    outcome = run("solve", "Swish", *options, "--json")
    assert json.loads(outcome.out) == table_to_dict(fewbit.solve("silu", **arguments))
    assert outcome.err == ""


def test_the_text_shows_every_number_of_the_table_close_levels_apart(run):
    table = fewbit.solve("silu", bits=2, kind="interval")
    lines = run("solve", "silu", "--bits", "2", "--kind", "interval").out.splitlines()
    assert lines[0] == "silu: 2 bits, 4 levels, 4 intervals, kind interval, weight uniform:-10,10"
    assert lines[1].split() == ["error", f"{table.error:.9g}"]
    assert table.lower_bound is not None
    gap = (table.error - table.lower_bound) / table.error
    assert lines[2].split()[:4] == ["lower", "bound", f"{table.lower_bound:.9g}", f"({100 * gap:.2g}"]
    assert lines[3].startswith("time")
    rows = [line.split() for line in lines[-4:]]
    ends = ["-inf", *(f"{b:.6f}" for b in table.boundaries), "inf"]
    assert [row[0] for row in rows] == ends[:-1]
    assert [row[1] for row in rows] == ends[1:]
    assert [int(row[2]) for row in rows] == table.codes.tolist()
    assert [row[3] for row in rows] == [f"{y:.6f}" for y in table.levels]
    assert "(exact)" in run("solve", "relu").out
    rows = run("solve", "gelu", "--bits", "1", "--weight", "uniform:-1e-9,1e-9").out.splitlines()[-2:]
    assert rows[0].split()[-1] != rows[1].split()[-1]


def test_the_file_reads_back_to_the_same_table_and_format_goes_before_the_name(run, tmp_path):
    path = tmp_path / "gelu.json"
    outcome = run("solve", "gelu", "-o", path)
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    assert fewbit.Table.from_json(path) == fewbit.solve("gelu")
    path = tmp_path / "table.txt"
    assert run("solve", "relu", "-o", path, "--format", "json").status == 0
    assert fewbit.Table.from_json(path) == fewbit.solve("relu")


def test_json_on_standard_output_stays_alone_when_files_are_written(run, tmp_path):
    outcome = run("solve", "relu", "--json", "-o", tmp_path / "relu.json", "--plot", tmp_path / "relu.svg")
    assert json.loads(outcome.out) == json.loads((tmp_path / "relu.json").read_text())
    assert outcome.err == f"wrote {tmp_path / 'relu.json'}\nwrote {tmp_path / 'relu.svg'}\n"


@pytest.mark.parametrize(("suffix", "file_format"), SUFFIXES.items())
def test_the_name_chooses_the_format(run, tmp_path, suffix, file_format):
    path = tmp_path / f"gelu{suffix}"
    assert run("solve", "gelu", "--bits", "2", "-o", path).status == 0
    assert path.read_bytes() == export(fewbit.solve("gelu", bits=2), file_format)


def test_cuda_is_the_header_of_the_kernels(run, tmp_path):
    path = tmp_path / "gelu.cuh"
    assert run("solve", "gelu", "-o", path).status == 0
    assert path.read_text() == cuda_header(fewbit.solve("gelu"), "gelu")


@pytest.mark.parametrize(
    "options",
    [
        *(["-o", "missing/table.json"], ["-o", "folder", "--format", "json"], ["-o", "table.txt"], ["-o", "table"]),
        *(["-o", "missing/table.cuh"], ["--format", "cuda"], ["--format", "c"], ["--plot", "missing/plot.png"]),
        *(["--plot", "plot.gif"], ["-o", "fine.json", "--plot", "missing/plot.png"]),
    ],
    ids=" ".join,
)
def test_outputs_are_checked_before_anything_is_solved(run, tmp_path, monkeypatch, options):
    def not_yet(*_, **__):
        pytest.fail("solved before the outputs were checked")

    monkeypatch.setattr(solve_module, "solve", not_yet)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert run("solve", "gelu", *options).status == 2
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_is_told_in_one_line(run_process):
    outcome = run_process("solve", "relu", "-o", "/dev/full", "--format", "json")
    assert outcome.status == 2
    assert outcome.err.startswith("fewbit: cannot write /dev/full") and outcome.err.count("\n") == 1


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_an_interrupted_write_leaves_the_old_file_and_no_half(run, tmp_path, monkeypatch, option):
    from fewbit.tables import files
    from matplotlib.figure import Figure

    path = tmp_path / ("gelu.json" if option == "-o" else "gelu.png")
    path.write_bytes(b"old")

    def half(figure, stream, **_):
        stream.write(b"\x89PNG half of it")
        raise KeyboardInterrupt

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", half)
    monkeypatch.setattr(files.os, "replace", interrupted)
    outcome = run("solve", "gelu", option, path)
    assert (outcome.status, outcome.err.split()) == (130, ["interrupted"])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_weight_may_be_a_file_and_one_that_holds_none_is_told_in_one_line(run, tmp_path):
    x = np.random.default_rng(0).normal(size=1000)
    np.save(tmp_path / "x.npy", x)
    outcome = run("solve", "gelu", "--weight", tmp_path / "x.npy", "--json", "--plot", tmp_path / "gelu.svg")
    assert json.loads(outcome.out) == table_to_dict(fewbit.solve("gelu", weight=weights.samples(x)))
    assert json.loads(outcome.out)["weight"].startswith("histogram:")
    (tmp_path / "x.csv").write_text("1,2\n")
    outcome = run("solve", "gelu", "--weight", tmp_path / "x.csv")
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "x.csv': not one number a line: 2 on each" in outcome.err


def test_an_expression_is_an_activation(run):
    outcome = run("solve", " x * sigmoid(1.702*x)", "--bits", "2", "--json")
    assert json.loads(outcome.out) == table_to_dict(fewbit.solve("x*sigmoid(1.702*x)", bits=2))


def test_kinks_may_be_given(run):
    text = "where((x-5.00390625)**2<2**-20,9,1)*x"
    rows = run("solve", text, "--bits", "1", "--kinks", "5.0029296875, 5.0048828125").out.splitlines()[-3:]
    assert [row.split()[-1] for row in rows] == ["1.000000", "9.000000", "1.000000"]
