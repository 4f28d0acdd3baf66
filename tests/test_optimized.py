"""`python -O` leaves assertions out: nothing that a user sees may hang on one."""

import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses
import torch
from torch import nn
import fewbit
from fewbit.runtime.backends.forwards import forward_of
from fewbit.runtime.tensors.spec import flat
from fewbit.runtime.quantizers import Outlier, PerGroup
from fewbit.runtime.convert.find import form_of

class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

def said(make):
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

torch.manual_seed(0)
if __name__ == "__main__":
    for act in (nn.SiLU(), torch.nn.functional.silu, torch.sin, nn.PReLU(), len):
        model = nn.Sequential(MLP(act))
        print(said(lambda: str(fewbit.convert(model, glu="parts"))))
    print(said(lambda: form_of(torch.sin)))
    x = torch.randn(2, 300)
    for codes in (PerGroup(2).compress(x), Outlier(3).compress(x)):
        print(said(lambda: dataclasses.replace(codes, packed=codes.packed[:0]).decompress()))
        print(tuple(codes.decompress().shape))
    print(said(lambda: flat(torch.randn(4, 4)[:, ::2])))
    print(said(lambda: fewbit.Table("f", "interval", "w", [1.0, 0.0], [0, 1, 2], [0.0, 1.0, 2.0], 0.0)))
    print(said(lambda: forward_of("min(x)")))
    print(said(lambda: fewbit.GELU()(torch.ones(2, dtype=torch.int64))))
    y = fewbit.GELU()(x.requires_grad_())
    y.sum().backward()
    print(float(y.sum()), float(x.grad.sum()))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimized") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.deep
def test_a_script_says_the_same_with_and_without_assertions(script):
    commands = [[sys.executable, *options, str(script)] for options in ([], ["-O"])]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    (plain, errors), (optimized, optimized_errors) = (process.communicate(timeout=240) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors + optimized_errors
    assert optimized == plain
    assert "AssertionError" not in plain
    assert "fewbit does not know its activation" in plain
    assert len(plain.splitlines()) > 15
