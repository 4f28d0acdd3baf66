"""A torch that is newer than those that the backend is tested with."""

import pytest
import torch
from compiled import Perceptron, gradients, op_by_op
from fewbit.runtime.compile import partitioner
from fewbit.runtime.compile.options import CompileOptions


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Perceptron(64)


def compiled(model):
    few = partitioner.FewbitPartitioner(CompileOptions.of({"smallest": 1024}))
    return torch.compile(model, backend=op_by_op(few), fullgraph=True)


def broken(*_):
    raise AttributeError("module 'torch._inductor' has no attribute 'prims'\nand a second line")


def test_what_it_refuses_is_divided_by_torch_and_exact_with_one_line(model, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(partitioner, "classify", broken)
    x = torch.randn(32, 64)
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is newer than 2\.13.*'prims'; torch's own division") as told:
        found = gradients(compiled(model), x)[1]
    assert "\n" not in str(told[0].message)
    torch.testing.assert_close(found, gradients(model, x)[1])


def test_what_works_there_is_in_few_bits(model, monkeypatch, recwarn):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    x = torch.randn(32, 64)
    found, exact = gradients(compiled(model), x)[1], gradients(model, x)[1]
    assert 0 < (found - exact).norm() / exact.norm() < 0.1
    assert not [w for w in recwarn if "newer" in str(w.message)]


def test_a_release_that_is_tested_raises_what_is_wrong(model, monkeypatch):
    monkeypatch.setattr(partitioner, "classify", broken)
    with pytest.raises(Exception, match="has no attribute"):
        gradients(compiled(model), torch.randn(32, 64))
