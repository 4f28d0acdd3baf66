"""Noise and bias of gradients, by how the bits are shared out."""

import torch
from fewbit.nn import GatedMLP
from fewbit.plots.studies.glu_errors import Split, gradient_errors, splits


def measured(given, draws=6):
    torch.manual_seed(0)
    model, x = GatedMLP(16, 64), torch.randn(128, 16)
    plan = model.plan
    errors = list(gradient_errors(model, lambda m: m(x).square().mean(), given, draws))
    assert model.plan == plan
    return errors


def test_splits_are_all_there_are():
    assert [s for s in splits(5) if s.keep == "parts"] == [Split("parts", 1, 2, 2)]
    assert {s.code + s.up + s.second for s in splits(11)} == {11}
    assert len(set(splits(11))) == len(splits(11)) and Split("parts", 3, 4, 4) in splits(11)


def test_noise_is_of_the_copies_and_bias_of_the_table():
    """A bit more in both copies is a quarter of the noise, or less of it; a coarser table alone adds bias."""
    fine, coarse, table = measured([Split("parts", 8, 5, 5), Split("parts", 8, 4, 4), Split("parts", 1, 5, 5)])
    assert 3 < coarse.noise / fine.noise < 6
    assert abs(fine.bias) < fine.noise
    assert table.bias > 3 * fine.noise > 50 * abs(fine.bias) and table.total > table.bias


def test_a_step_in_a_function_that_is_not_linear_is_a_bias():
    (coarse,) = measured([Split("inputs", 0, 8, 1)])
    assert coarse.bias > 0.01
