import json
import math
import sys

import fewbit
import pytest
from fewbit.plots.demo import calibration as experiment
from fewbit.plots.demo.settings import Settings, Size
from fewbit.tables.json_format import dumps

CODE = """
import torch
from torch import nn
import fewbit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 16), nn.GELU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.unused = nn.GELU()

    def forward(self, x):
        return self.last(self.second(self.first(x)))

def loss(output, batch):
    return output.square().mean()

def first(batch):
    return batch["x"]

def batches(n=3):
    return [torch.randn(32, 4) * 2 for _ in range(n)]

def setup():
    torch.manual_seed(0)
    return Net(), batches(), loss

def stream():
    torch.manual_seed(0)
    return Net(), (batch for batch in batches()), loss

def with_inputs():
    torch.manual_seed(0)
    return Net(), [{"x": batch, "y": 1} for batch in batches()], loss, first

def with_loss():
    class Own(Net):
        def forward(self, x):
            return super().forward(x).square().mean()
    torch.manual_seed(0)
    return Own(), batches()

def nan():
    model, data, loss = setup()
    data[1][0] = torch.nan
    return model, data, lambda output, batch: output[1:].square().mean()

def no_loss():
    return Net(), batches()

def one():
    return Net()

def five():
    return 1, 2, 3, 4, 5

def argument(model):
    return model

def fails():
    raise ZeroDivisionError("on purpose")

def wrong_shape():
    return Net(), [torch.randn(32, 5)], loss

def no_activation():
    return nn.Linear(4, 4), batches(), loss

def tensor():
    return Net(), torch.randn(32, 4), loss

def number():
    return Net(), 3, loss

def wrong_bits():
    return fewbit.GELU(bits=9), batches(), loss
"""
LINE = 1 + CODE.splitlines().index("        return self.last(self.second(self.first(x)))")


@pytest.fixture
def target(tmp_path, monkeypatch):
    """The text that names a function of the user's file."""
    path = tmp_path / "code" / "train.py"
    path.parent.mkdir()
    path.write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda function: f"{path}:{function}"


def test_the_report_and_the_files(run, target, tmp_path):
    folder = tmp_path / "deep" / "output"
    outcome = run("calibrate", target("setup"), "-o", folder)
    assert outcome.status == 0, outcome.err
    assert outcome.err == f"wrote 3 weights, 3 tables and calibration.json to {folder}\n"  # and no progress bar
    lines = outcome.out.splitlines()
    rows = [line.split() for line in lines[1:4]]
    assert [row[:3] for row in rows] == [
        ["first.1", "gelu", "1,536"],
        ["second.1", "gelu", "1,536"],
        ["last.1", "tanh", "1,536"],
    ]
    assert lines[4].split()[0] == "all"
    assert "3 bits, kind shared; batches: 3." in lines
    assert lines[-1] == "No gradient reached unused."
    content = json.loads((folder / "calibration.json").read_text())
    for row, module in zip(rows, content["modules"], strict=True):
        assert row[3:6] == [
            f"{module['default_error']:.3g}",
            f"{module['error']:.3g}",
            f"{module['ratio']:.2f}",
        ]
        assert module["ratio"] == module["default_error"] / module["error"] >= 1
        table = fewbit.Table.from_json(folder / module["table"])
        assert (table.activation, table.bits, table.error) == (module["activation"], 3, module["error"])
    names = ["first.1", "last.1", "second.1"]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == [f"{name}.npz" for name in names]
    assert sorted(path.name for path in (folder / "tables").iterdir()) == [f"{name}.json" for name in names]


def test_a_weight_goes_straight_into_solve(run, target, tmp_path):
    run("calibrate", target("setup"), "-o", tmp_path, "--bits", 2, "--kind", "interval")
    weight = tmp_path / "weights" / "first.1.npz"
    outcome = run("solve", "gelu", "--bits", 2, "--kind", "interval", "--weight", weight, "--json")
    assert outcome.status == 0
    solved, calibrated = json.loads(outcome.out), json.loads((tmp_path / "tables" / "first.1.json").read_text())
    for field in ("weight", "boundaries", "levels", "codes", "error"):
        assert solved[field] == calibrated[field]


def test_json_is_what_the_file_holds(run, target, tmp_path):
    outcome = run("calibrate", target("setup"), "-o", tmp_path, "--bits", 1, "--json")
    content = json.loads(outcome.out)
    assert (content["bits"], content["kind"], content["batches"]) == (1, "shared", 3)
    assert (content["silent"], content["skipped"]) == (["unused"], 0)
    assert outcome.out == (tmp_path / "calibration.json").read_text() == dumps(content)


def test_pooled_is_one_table_an_activation(run, target, tmp_path):
    outcome = run("calibrate", target("setup"), "-o", tmp_path, "--pooled", "--json")
    assert [(m["name"], m["elements"]) for m in json.loads(outcome.out)["modules"]] == [("gelu", 3072), ("tanh", 1536)]
    assert json.loads(outcome.out)["silent"] == ["unused"]
    assert (tmp_path / "tables" / "gelu.json").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", ["stream", "with_inputs", "with_loss"])
def test_whatever_the_function_returns_the_result_is_the_same(run, target, tmp_path, function):
    expected = run("calibrate", target("setup"), "-o", tmp_path, "--json").out
    assert run("calibrate", target(function), "-o", tmp_path, "--json").out == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("function", ["setup", "stream"])
@pytest.mark.parametrize(("given", "run_through"), [(1, 1), (2, 2), (9, 3)])
def test_so_many_batches_as_asked_for(run, target, tmp_path, function, given, run_through):
    outcome = run("calibrate", target(function), "-o", tmp_path, "--batches", given, "--json")
    content = json.loads(outcome.out)
    assert content["batches"] == run_through
    assert content["modules"][0]["elements"] == run_through * 32 * 16


def test_inputs_that_are_not_finite_are_told(run, target, tmp_path):
    outcome = run("calibrate", target("nan"), "-o", tmp_path)
    assert outcome.status == 0
    assert "Left out as they or their gradients were not finite: 48 inputs." in outcome.out


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("no_loss", 2, "give loss=, a function (output, batch) -> scalar"),
        ("one", 2, "must return (model, batches), with a loss and inputs if need be, and returns a Net"),
        ("five", 2, "returns 5 things"),
        ("no_activation", 2, "no activation that fewbit knows"),
        ("tensor", 2, "not Tensor; [batch] is one"),
        ("number", 2, "not int"),
        ("wrong_bits", 2, "bits must be"),
        ("nowhere", 2, "has no 'nowhere'"),
        ("fails", 1, "ZeroDivisionError: on purpose"),
        ("argument", 1, "TypeError: argument() missing 1 required positional argument"),
        ("wrong_shape", 1, f"failed at train.py, line {LINE}: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(run, target, tmp_path, function, status, message):
    outcome = run("calibrate", target(function), "-o", tmp_path / "output")
    assert outcome.status == status
    assert message in outcome.err
    assert outcome.err.startswith("fewbit: ") and outcome.err.count("\n") == 1
    assert not outcome.out
    assert not list(tmp_path.glob("output/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "output"], "give a TARGET or --demo"),
        (["os:getcwd", "--demo", "-o", "output"], "give a TARGET or --demo, not both"),
        (["os:getcwd"], "Missing option '-o'"),
        (["os:getcwd", "-o", "output", "--bits", "9"], "bits must be"),
        (["os:getcwd", "-o", "output", "--kind", "other"], "shared"),
        (["os:getcwd", "-o", "output", "--batches", "0"], "0 is not in the range"),
        (["gelu", "-o", "output"], "is not of the form package.module:function or file.py:function"),
        (["no_such.py:setup", "-o", "output"], "there is no file no_such.py"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    outcome = run("calibrate", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_a_file_is_refused(run, target, tmp_path):
    (tmp_path / "file").write_text("mine")
    outcome = run("calibrate", target("setup"), "-o", tmp_path / "file")
    assert outcome.status == 2
    assert f"cannot make the folder {tmp_path / 'file'}: " in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_demo_measures_the_experiments_transformer(run, tmp_path, monkeypatch):
    small = Settings(steps=2, batch=2, size=Size(width=16, depth=2, heads=2, context=8))
    monkeypatch.setattr(experiment, "SETTINGS", small)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    outcome = run("calibrate", "--demo", "-o", tmp_path, "--batches", 3, "--json")
    assert outcome.status == 0, outcome.err
    modules = json.loads(outcome.out)["modules"]
    assert [module["name"] for module in modules] == ["blocks.0.mlp.1", "blocks.1.mlp.1"]
    assert all(module["elements"] == 3 * 2 * 8 * 64 for module in modules)
    assert all(module["ratio"] >= 1 and math.isfinite(module["ratio"]) for module in modules)
