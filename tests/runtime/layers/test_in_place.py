"""Outputs of compressed layers are tensors of their own: what is changed in place later follows as in torch."""

import copy
import importlib
import sys

import fewbit
import pytest
import torch
from in_threads import in_threads
from small_modules import Gated
from torch import nn


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


L2 = {"level": "L2"}
CASES = {
    "linear": (lambda: nn.Linear(16, 16), (4, 8, 16), L2),
    "linear of one row": (lambda: nn.Linear(16, 16), (16,), L2),
    "convolution of one image": (lambda: nn.Conv1d(8, 8, 3), (8, 64), L2),
    "transposed convolution of one image": (lambda: nn.ConvTranspose2d(8, 8, 2), (8, 8, 8), L2),
    "attention": (Multihead, (2, 8, 16), L2),
    "gated": (lambda: Gated(16, 32), (4, 8, 16), {"glu": "parts"}),
    "outliers": (lambda: nn.Linear(16, 16), (4, 8, 16), {"outliers": 0.02}),
    "chain": (
        lambda: nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)),
        (64, 16),
        {"fuse_preact": 4},
    ),
}


def in_place(y):
    """Change views of y, whichever of its dimensions they have, as DeBERTa and Swin do."""
    y.unsqueeze(0).transpose(0, -1).mul_(0.5)
    y[..., 0] = 1
    nn.functional.relu_(y)
    return y


@pytest.mark.parametrize("name", CASES)
def test_ops_in_place_follow_as_in_torch(name):
    make, shape, options = CASES[name]
    torch.manual_seed(0)
    exact, x = make(), torch.randn(shape, requires_grad=True)
    few = copy.deepcopy(exact)
    report = fewbit.convert(few, **options)
    few = report.model
    assert report.replaced
    ys, gradients = zip(*(run(model, x) for model in (exact, few)), strict=True)
    assert torch.equal(*ys)
    difference = sum((a - b).square().sum() for a, b in zip(*gradients, strict=True))
    assert difference < 0.2**2 * sum(g.square().sum() for g in gradients[0])


def run(model, x):
    y = in_place(model(x * 1))
    return y.detach(), torch.autograd.grad(y.square().sum(), [x, *model.parameters()])


SOURCES = {
    "y += x": "y = self.norm(x)\n    y += 1",
    "y.add_": "y = self.norm(x)\n    z = y\n    y.add_(1)",
    "y[0] =": "y = self.norm(x)\n    y[0] = 0",
    "a module": "y = self.act(self.norm(x))",
    "none": "y = self.norm(x)\n    y = y + 1\n    y += 1",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_normalization_whose_output_is_written_over_is_left_and_the_report_says_why(name, tmp_path, monkeypatch):
    source = f"""
from torch import nn

class Net(nn.Module):
  def __init__(self):
    super().__init__()
    self.norm, self.act, self.last = nn.LayerNorm(16), nn.ReLU(inplace=True), nn.Linear(16, 16)

  def forward(self, x):
    {SOURCES[name]}
    return self.last(y)
"""
    (tmp_path / "written_over.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("written_over", None)
    importlib.invalidate_caches()
    model = importlib.import_module("written_over").Net()
    report = fewbit.convert(model, fewbit.Normalizations())
    assert [row.name for row in report.left] == ([] if name == "none" else ["norm"])
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()


def test_a_normalization_in_a_sequence_before_a_relu_in_place_is_left():
    report = fewbit.convert(nn.Sequential(nn.LayerNorm(16), nn.ReLU(inplace=True)), fewbit.Normalizations())
    assert "works in place on its output" in str(report) and not report.replaced


def test_an_output_kept_and_changed_unseen_is_refused_with_the_remedy():
    model = nn.LayerNorm(16)
    report = fewbit.convert(model, fewbit.Normalizations())
    assert "changed in place" in str(report)
    y = model(torch.randn(4, 16, requires_grad=True) * 1).add_(1)
    with pytest.raises(RuntimeError, match="exclude="):
        y.sum().backward()


JAGGED = {
    "3 bits": {"bits": 3},
    "L2": L2,
    "L3": {"level": "L3"},
    "outliers": {"outliers": 0.02},
    "gated": {"glu": "parts", "level": "L2"},
}


@pytest.mark.parametrize("name", JAGGED)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_take_torchs_own_path(name, layout):
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), Gated(16, 32), nn.ReLU(), nn.Linear(16, 16))
    twin = copy.deepcopy(model)
    fewbit.convert(twin, **JAGGED[name])
    gradients = []
    for each in (model, twin):
        sum(part.sum() for part in each(x).unbind()).backward()
        gradients.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("options", [L2, {"level": "L4"}, {"glu": "parts", "level": "L2"}], ids=str)
def test_threads_may_run_one_model(options):
    """Each thread's outputs and gradients are its own; replicas of `nn.DataParallel` share savers and queues."""
    model = nn.Sequential(nn.Linear(16, 16), Gated(16, 32), nn.Linear(16, 16))
    batches = [torch.randn(8, 16) for _ in range(4)]
    outputs = [model(x).detach() for x in batches]
    fewbit.convert(model, **options)

    def train(i):
        for _ in range(10):
            found = model(batches[i])
            gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
            assert torch.equal(found, outputs[i]) and all(g.isfinite().all() for g in gradients)

    in_threads(train, range(4))
