"""Adapters of low rank beside frozen layers."""

import copy

import torch
from fewbit.plots.studies.adapters import Adapted, adapt
from torch import nn


def model():
    return nn.Sequential(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), nn.Linear(6, 3))


def test_change_nothing_before_they_are_trained():
    plain = model()
    adapted = adapt(copy.deepcopy(plain), rank=2)
    x = torch.randn(5, 6)
    assert torch.equal(plain(x), adapted(x))


def test_alone_learn_and_leave_the_output_layer_or_are_where_a_pattern_says():
    adapted = adapt(model(), rank=2)
    assert [name for name, m in adapted.named_modules() if isinstance(m, Adapted)] == ["0.0", "0.2"]
    adapted(torch.randn(5, 6)).sum().backward()
    learning = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert learning == {f"0.{i}.{part}.weight" for i in (0, 2) for part in ("down", "up")}
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == 2 * 2 * (6 + 12)
    adapted = adapt(model(), rank=2, pattern="*.2")
    assert [name for name, m in adapted.named_modules() if isinstance(m, Adapted)] == ["0.2"]
