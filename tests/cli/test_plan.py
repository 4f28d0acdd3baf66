"""`fewbit plan` as a user runs it."""

import json

import pytest
from fewbit import Plan

TARGET = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def setup(batch=16):
    return Net(), torch.randn(batch, 32, 64), lambda y: y.square().mean()

def no_loss():
    return Net(), torch.randn(4, 32, 64)

def nothing():
    return 1
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "train.py").write_text(TARGET)
    return f"{tmp_path}/train.py"


def test_prints_a_plan_and_writes_it(run, target, tmp_path):
    files = "-o", f"{tmp_path}/plan.json", "--plot", f"{tmp_path}/p.png"
    result = run("plan", f"{target}:setup", "--error", "0.1", "--no-recompute", *files)
    assert "peak:" in result.out and "layers.*" in result.out
    plan = Plan.from_json(tmp_path / "plan.json")
    assert plan.error <= 0.1 and len(plan.frontier) > 10
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_prints_json_alone(run, target):
    found = json.loads(run("plan", f"{target}:setup", "--error", "0.1", "--json").out)
    assert found["peak"]["parameters"] == 3 * (64 * 64 + 64) * 4


def test_finds_the_largest_batch(run, target):
    found = json.loads(run("plan", f"{target}:setup", "--memory", "2MB", "--batch", "max", "--json").out)
    assert found["batch"] > 16


def test_plans_for_a_built_in_model_without_memory(run):
    found = run("plan", "gpt2", "--memory", "4GB", "--sequence", "128", "--gpu", "rtx4090").out
    assert "estimated from shapes" in found


@pytest.mark.parametrize(
    ("name", "options", "words", "status"),
    [
        ("setup", (), "give memory=", 2),
        ("setup", ("--memory", "much"), "not a size", 2),
        ("setup", ("--memory", "1MB", "--batch", "some"), "--batch is a number", 2),
        ("no_loss", ("--memory", "1GB"), "give loss=", 2),
        ("nothing", ("--memory", "1GB"), "(model, inputs, loss)", 2),
        ("setup", ("--memory", "100KB"), "no plan fits", 1),
    ],
)
def test_errors_are_one_line(run, target, name, options, words, status):
    result = run("plan", f"{target}:{name}", *options)
    assert result.status == status and words in result.err and result.err.count("\n") == 1
