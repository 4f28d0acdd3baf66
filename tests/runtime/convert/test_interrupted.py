"""A conversion that is broken off leaves the model as it was."""

import sys

import fewbit
import pytest
import torch
from fewbit.runtime.convert.swap import precision_of
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(14, 16), nn.GELU())


def state(model):
    """Return what a conversion may change: identities, so that `==` compares them."""
    modules = {}
    for name, module in model.named_modules():
        entries = {k: list(v.items()) if isinstance(v, dict) else id(v) for k, v in vars(module).items()}
        precision = precision_of(module)
        modules[name] = (id(module), type(module), entries, precision and [*precision.savers])
    return modules


def interrupted(action, at):
    """Run `action` and raise KeyboardInterrupt at its call number `at` of a function of the runtime."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and "/runtime/" in frame.f_code.co_filename and "<" not in frame.f_code.co_name
        if calls == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        action()
    except KeyboardInterrupt:
        return None
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("before", [{}, {"level": "L3"}], ids=str)
@pytest.mark.parametrize("options", [{"level": "L3"}, {"outliers": 0.02}, {"fuse_preact": 4}, {}], ids=str)
def test_ctrl_c_leaves_the_model_as_it_was(before, options):
    def act(each):
        fewbit.convert(each, **options) if options else fewbit.revert(each)

    def converted():
        each = model()
        if before:
            fewbit.convert(each, **before)
        return each

    act(converted())
    each = converted()
    total = interrupted(lambda: act(each), -1)
    for part in range(1, 8):
        each = converted()
        was = state(each)
        assert interrupted(lambda each=each: act(each), 1 + total * part // 8) is None
        assert state(each) == was


def test_conversion_takes_no_step_of_a_spectral_norm():
    spectral_norm = nn.utils.parametrizations.spectral_norm
    each = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), spectral_norm(nn.Linear(16, 4)))
    vectors = [b.clone() for b in each.buffers()]
    fewbit.convert(each, bits=3)  # asks whether the layer after the Tanh is frozen
    assert all(map(torch.equal, vectors, each.buffers()))
    assert all(m.training for m in each.modules())
