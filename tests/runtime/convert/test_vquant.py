"""`fewbit.convert(model, outliers=0.02)`: V-Quant's layers among the few-bit activations, in one report."""

import fewbit
import torch
from fewbit.runtime.inference.vquant import OutlierSaver, ValueAwareReLU
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 8), nn.GELU(), nn.Linear(8, 2)),
    )


def test_one_report_of_all():
    model = network()
    x = torch.randn(2, 3, 8, 8)
    y = model(x)
    report = fewbit.convert(model, bits=3, outliers=0.02)
    assert report.model is model
    assert {r.name: r.bits for r in report.replaced} == {"1.2": 3, "0.0": 3, "0.2": 3, "1.1": 3, "1.3": 3}
    assert [(left.name, left.why) for left in report.left] == [
        ("0.1", "the error it propagates depends on what it saves")
    ]
    assert isinstance(model[0][2], ValueAwareReLU)
    assert isinstance(model[1][3].saver, OutlierSaver)
    assert isinstance(model[1][2], fewbit.GELU)
    assert "3 bits by V-Quant" in str(report)
    model.train()
    assert torch.equal(model(x), y)


def test_converting_again_without_outliers_leaves_layers_and_takes_relus():
    model = network()
    fewbit.convert(model, outliers=0.02)
    fewbit.convert(model, bits=2)
    assert isinstance(model[0][2], fewbit.ReLU)
    assert isinstance(model[1][1].saver, OutlierSaver)
    fewbit.convert(model, bits=2, outliers=0.1)
    assert model[0][2].quantizer.ratio == 0.1
    fewbit.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in network().modules()]


def test_the_model_may_be_one_layer():
    report = fewbit.convert(nn.Linear(3, 3), outliers=0.02)
    assert isinstance(report.model.saver, OutlierSaver)
    assert type(fewbit.revert(report.model)) is nn.Linear
