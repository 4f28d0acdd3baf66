"""Layers that change their class, by a level and by V-Quant alike: they stay the very objects, whoever holds them."""

import fewbit
import pytest
import torch
from fewbit import FewbitError, layers, memory
from fewbit.quantizers import PerGroup
from fewbit.runtime.allocation import MixedPrecision
from fewbit.runtime.inference.vquant import OutlierSaver
from fewbit.runtime.layers.saver import QuantizerSaver
from torch import nn

WAYS = {"level": {"level": "L2"}, "mixed": {"level": "L3"}, "outliers": {"outliers": 0.02}}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 64), nn.Tanh())


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
WITH_WEIGHTS = (0, 4)


class Holder(nn.Module):
    """A module that holds layers of another in a list, which is no place that anybody could find."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.listed = [body[i] for i in WITH_WEIGHTS]

    def forward(self, x):
        return self.listed[1](self.body[:4](x))


@ways
def test_whoever_holds_a_layer_goes_on_holding_it(way):
    model = Holder(network())
    expected, exact = model(X), memory.profile(model, X).total
    modules = [model.body[i] for i in (0, 2, 4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fewbit.convert(model, **way)
    assert all(a is model.body[i] for a, i in zip(modules, (0, 2, 4), strict=True))
    assert torch.equal(model(X), expected)
    held = X.numel() * X.element_size()  # by the caller, and saved as it is
    assert (
        memory.profile(model, X).total - held < (exact - held) / 3
    )  # the layer that is called by way of the list is converted too
    model(X).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    fewbit.revert(model)
    assert [type(m) for m in model.body] == [type(m) for m in network()]
    assert all(a is model.body[i] for a, i in zip(modules, (0, 2, 4), strict=True))


@pytest.mark.parametrize("first", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("second", WAYS.values(), ids=WAYS)
def test_what_has_been_converted_by_one_method_is_converted_anew_by_the_other(first, second):
    model, twice = network(), network()
    fewbit.convert(model, **second)
    fewbit.convert(twice, **first)
    report = fewbit.convert(twice, **second)
    assert [row.was for row in report.replaced if row.name in "04"] == [repr(network()[i]) for i in WITH_WEIGHTS]
    assert [type(m) for m in twice] == [type(m) for m in model]
    for ours, theirs in zip(twice, model, strict=True):
        assert type(vars(ours).get("saver")) is type(vars(theirs).get("saver"))
    torch.manual_seed(2)
    kept = memory.profile(model, X).total
    torch.manual_seed(2)
    assert memory.profile(twice, X).total == kept
    fewbit.revert(twice)
    assert not twice._forward_pre_hooks
    assert [vars(m).keys() for m in twice] == [vars(m).keys() for m in network()]


def test_layers_that_leave_mixed_precision_leave_the_others_their_bits():
    model = network()
    fewbit.convert(model, level="L3")
    precision = model[0].saver.precision
    fewbit.convert(model, outliers=0.02, include="4")
    assert isinstance(model[4].saver, OutlierSaver) and model[0].saver.precision is precision
    assert list(precision.bits) == ["0"]
    for _ in range(2):
        model(X).sum().backward()
    fewbit.convert(model, outliers=0.02)
    assert precision._hook.id not in model._forward_pre_hooks and not precision.savers


def test_a_precision_of_the_users_keeps_the_users_layers():
    own = layers.Linear(8, 8, bits=8)
    model = nn.Sequential(nn.Linear(8, 8), own)
    fewbit.convert(model, level="L2")
    precision = MixedPrecision(model, 2)
    fewbit.revert(model)
    assert type(model[0]) is nn.Linear and list(precision.bits) == ["1"] and own.saver.precision is precision
    precision.remove()
    assert own.saver == QuantizerSaver(PerGroup(bits=8))


@ways
def test_a_layer_that_was_parametrized_before_is_left_and_told(way):
    model = network()
    torch.nn.utils.parametrizations.weight_norm(model[4])
    report = fewbit.convert(model, **way)
    assert type(model[4]).__name__ == "ParametrizedLinear" and "4" not in {row.name for row in report.replaced}
    model(X).sum().backward()


@ways
def test_revert_refuses_what_was_parametrized_since_and_changes_nothing(way):
    model = network()
    fewbit.convert(model, **way)
    torch.nn.utils.parametrizations.weight_norm(model[4])
    kinds = [type(m) for m in model]
    with pytest.raises(FewbitError, match=r"^4 became a ParametrizedLinear after it was converted: take off"):
        fewbit.revert(model)
    assert [type(m) for m in model] == kinds
    y = model(X)
    torch.nn.utils.parametrize.remove_parametrizations(model[4], "weight")
    assert [type(m) for m in fewbit.revert(model)] == [type(m) for m in network()]
    assert torch.equal(model(X), y)


def test_a_layer_with_a_forward_of_its_own_is_told_by_both():
    for way in WAYS.values():
        model = network()
        model[4].forward = lambda x: x
        report = fewbit.convert(model, **way)
        assert [row.why for row in report.left if row.name == "4"] == ["its forward was replaced on the instance"]
