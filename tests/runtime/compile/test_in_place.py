"""Results of the backward pass over values that nothing reads any more: the same gradients, in less memory."""

import copy

import pytest
import torch
from compiled import gradients
from fewbit.runtime.compile import partitioner
from fewbit.runtime.compile.in_place import overwrite
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

ROWS, WIDTH, WIDE = 96, 64, 176


class GatedMLP(nn.Module):
    """A layer whose backward pass reads three of its largest tensors in one kernel, and writes three."""

    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, WIDE, bias), nn.Linear(WIDTH, WIDE, bias)
        self.down = nn.Linear(WIDE, WIDTH, bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)).square().sum()


def gradients_and_allocations(write, monkeypatch, bias, options, dynamic):
    """Return the gradients of a gated MLP, and how many tensors of its largest size the backward pass allocates."""
    monkeypatch.setattr(partitioner, "overwrite", write)
    torch.compiler.reset()
    torch.manual_seed(1)
    model = torch.compile(GatedMLP(bias), backend="fewbit", options={"smallest": 0} | options, dynamic=dynamic)
    (_, found), code = run_and_get_code(gradients, model, torch.randn(ROWS, WIDTH))
    return found, sum(f", {WIDE}), (" in line for line in code[-1].splitlines() if "= empty_strided_cpu(" in line)


# A bias's gradient is a sum of what products read, beside them; a size that varies has symbols for its strides.
@pytest.mark.parametrize(("bias", "options", "dynamic"), [(False, {}, None), (True, {"bits": 2}, True)])
def test_gradients_are_the_same_and_three_of_six_tensors_are_not_there(monkeypatch, bias, options, dynamic):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    before, many = gradients_and_allocations(lambda graph: 0, monkeypatch, bias, options, dynamic)
    after, few = gradients_and_allocations(overwrite, monkeypatch, bias, options, dynamic)
    assert torch.equal(after, before)
    assert few == many - 3


def written_twice(a, b, c):
    g, h = a @ b, b @ a
    return (g.sin() * h) @ c, (h.cos() * g) @ c


# Functions of square matrices, and how many results go over values. What nothing reads behind is g = a @ b.
GRAPHS = {
    "a result over what it reads": (lambda a, b, c: (a @ b).sin() @ c, 1),
    "results over two values that both read": (written_twice, 2),
    "a product that can wait": (lambda a, b, c: ((g := a @ b).sin() @ c, (g.cos() * c).sum(0)), 0),
    "a product before the last that reads the value": (
        lambda a, b, c: ((g := a @ b), (r := g.sin()) @ c, (g * r).exp() @ c)[1:],
        1,
    ),
    "the value is split": (lambda a, b, c: (a @ b).split(40)[0].sin() @ c, 0),
    "the value is returned": (lambda a, b, c: ((g := a @ b), g.sin() @ c), 0),
    "a view of the value is returned": (lambda a, b, c: ((g := a @ b).view(-1), g.sin() @ c), 0),
    "the value is read by a product": (lambda a, b, c: (g := a @ b).sin() @ g, 0),
    "the value is read again behind the product": (lambda a, b, c: ((g := a @ b).sin() @ c) * g, 0),
    "what is computed of the value is read behind the product": (
        lambda a, b, c: ((s := (a @ b).sin()).exp() @ c) * s,
        0,
    ),
    "the result is returned": (lambda a, b, c: ((r := (a @ b).sin()), r @ c), 0),
    "the result lies otherwise": (lambda a, b, c: ((a @ b).T + c).T.contiguous() @ c, 0),
    "the result has another dtype": (lambda a, b, c: (a @ b).sin().double() @ c.double(), 0),
    "the result is larger": (lambda a, b, c: ((a @ b)[None] * torch.stack([c, c])) @ c, 0),
    "a sum over rows lies between": (lambda a, b, c: ((g := a @ b) / g.sum(0)) @ c, 0),
    "no product reads the result": (lambda a, b, c: (a @ b).sin(), 0),
    "the value is a parameter": (lambda a, b, c: a.sin() @ c, 0),
}


@pytest.mark.parametrize(("function", "copies"), GRAPHS.values(), ids=GRAPHS)
def test_only_what_nothing_reads_any_more_is_written_over(function, copies):
    inputs = torch.randn(3, 80, 80)
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    before, given = traced(*inputs), copy.deepcopy(inputs)
    written = overwrite(traced.graph)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), before, rtol=0, atol=0)
    assert torch.equal(inputs, given)
    assert written == copies
