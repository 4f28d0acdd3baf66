"""`fewbit fits` as a user runs it: the answer, and the exit status that a scheduler reads."""

import json

import pytest

TARGET = """
import torch
from torch import nn

def setup(batch=16):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
    return nn.Sequential(*layers), torch.randn(batch, 32, 64), lambda y: y.square().mean()
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "train.py").write_text(TARGET)
    return f"{tmp_path}/train.py:setup"


def test_the_exit_status_is_the_answer(run, target):
    yes = run("fits", target, "--memory", "1GiB")
    assert yes.status == 0
    assert yes.out.startswith("yes, as it is: an exact step takes ")
    assert run("fits", target, "--memory", "100%").out.startswith("yes, as it is: an exact step takes ")
    no = run("fits", target, "--memory", "100kB", "--batch", "2", "--meta", "--json")
    assert (no.status, no.err) == (1, "")
    found = json.loads(no.out)
    assert found["fits"] is False and run("fits", target, "--memory", "1%").status == 1
    assert found["least"]["parameters"] == 3 * (64 * 64 + 64) * 4
    assert sum(size for key, size in found["least"].items() if key != "moment") > 100_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--memory"),
        (("--memory", "1GiB", "--batch", "max"), "--batch is a number of samples"),
        (("--memory", "150%x"), "'150%x' is not a share of the exact step's peak, such as 50%"),
    ],
)
def test_wrong_use(run, target, options, said):
    outcome = run("fits", target, *options)
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert said in outcome.err
