"""A guard: few bits that break a training are noticed, and what they hurt is exact from then on."""

import copy
import logging
from contextlib import nullcontext
from dataclasses import replace

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.quantizers import PerGroup
from fewbit.runtime.plan.compiled_planner import CompiledPlanner
from torch import nn


class Net(nn.Module):
    """Its first hidden feature is many times as large as the others, so that few bits are few for these."""

    def __init__(self, times=12.0, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4, bias=False)
        self.drop = nn.Dropout(dropout)
        with torch.no_grad():
            self.first.weight[0] *= times
            self.last.weight[:, 0] = 0

    def forward(self, x, y):
        return {"loss": (self.last(self.drop(self.first(x)).pow(3)) - y).square().mean()}


def batch(device="cpu"):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    return {"x": x.to(device), "y": x[:, :4].sin().to(device)}


def plan_of(bits, times=12.0, dropout=0.0):
    """A plan that gives all tensors so many bits, which no plan does by itself."""
    with torch.device("meta"):
        plan = fewbit.plan(Net(times, dropout), batch("meta"), error=0.5)
    for choice in plan.choices:
        plan = plan.with_choice(choice.target, "groups" if bits else "exact", bits)
    return plan


def train(model, steps):
    """With a warm-up, and without the first feature, which would need another rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.tensor(0.0)
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, i / 20)
        loss = model(**batch())["loss"]
        optimizer.zero_grad()
        loss.backward()
        model.last.weight.grad[:, 0] = 0
        model.first.weight.grad[0] = 0
        optimizer.step()
    return float(loss.detach())


def seeded(**options):
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.filterwarnings("ignore:fewbit. the plan stays")
def test_a_training_that_2_bits_break(caplog):
    plan = plan_of(2)
    assert train(seeded(), 60) < 0.02
    broken = seeded()
    fewbit.fit(broken, plan=plan)
    assert not train(broken, 60) < 1
    fitted = fewbit.fit(seeded(), plan=plan, guard=1)
    with caplog.at_level(logging.WARNING, logger="fewbit.guard"):
        assert train(fitted.model, 60) < 0.02
    guard = fitted.guard
    assert guard.exact and len(caplog.records) == len(guard.events) >= 1
    assert all(error < 3**-0.5 for error in guard.errors.values())
    # A checkpoint: another process goes on with the same exact layers, by the same plan.
    other = fewbit.fit(copy.deepcopy(broken), plan=plan, guard=1)
    other.guard.load_state_dict(guard.state_dict())
    assert (other.exact, other.plan, other.guard.events) == (fitted.exact, fitted.plan, guard.events)
    fitted.undo()
    assert not fitted.model._forward_pre_hooks


def test_what_does_no_harm_is_left():
    """Measured steps change nothing: neither gradients, nor the random state, nor the plan."""
    losses = []
    for guard in (False, 3):
        model = seeded(times=1.0, dropout=0.1)
        fitted = fewbit.fit(model, plan=plan_of(None, 1.0, 0.1), guard=guard)
        losses.append([train(model, 4), *(p.detach().clone() for p in model.parameters())])
    assert fitted.guard.errors and not fitted.guard.events
    assert all(error == 0 for error in fitted.guard.errors.values())
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


def test_blocks_that_become_exact_are_computed_again():
    """Of a block nothing is rounded then, and less is saved than in codes; what is outside of layers is told apart."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
            self.last = nn.Linear(16, 4)

        def forward(self, x, y):
            for block in self.blocks:
                x = x + block(x)
            return {"loss": (self.last(x.pow(2)) - y).square().mean()}

    with torch.device("meta"):
        plan = fewbit.plan(Blocks(), batch("meta"), error=0.5, recompute=False)
    fitted = fewbit.fit(Blocks(), plan=plan, guard=1)
    state = fitted.guard.state_dict()
    fitted.guard.load_state_dict({**state, "exact": ["blocks.1", ""]})
    assert ["forward" in vars(block) for block in fitted.model.blocks] == [False, True, False]
    assert all(target in fitted.exact for target in ("blocks.1.1:0", ":0"))
    assert all(target not in fitted.exact for target in ("blocks.0.1:0", "last:0"))
    fitted.undo()
    assert not any("forward" in vars(block) for block in fitted.model.blocks)


def test_wrong_arguments():
    with pytest.raises(FewbitError, match="guard is an integer"):
        fewbit.fit(Net(), plan=plan_of(8), guard=0)
    with pytest.raises(FewbitError, match="growth"):
        fewbit.guard(Net(), growth=1)
    with pytest.raises(FewbitError, match="no option"):
        fewbit.guard(Net(), options={"bit": 2})
    fitted = fewbit.fit(Net(), plan=plan_of(8), guard=1)
    with pytest.raises(FewbitError, match="not the state of this guard: errors"):
        fitted.guard.load_state_dict({"exact": []})
    before = fitted.guard.state_dict()
    later = {**before, "steps": 7, "exact": ["first"]}
    for wrong in ({"plan": "no plan"}, {"exact": None}, {"exact": ["second"]}, {"steps": "7"}):
        with pytest.raises(FewbitError, match=r"no layer|not a plan|not the state of this guard"):
            fitted.guard.load_state_dict({**later, **wrong})
        assert fitted.guard.state_dict() == before  # not half of another's


def test_a_compiled_model(monkeypatch):
    """Its layers are left out of the codes, by compiling it anew. A double of the compiler takes its options."""
    compiled = []

    def compile_double(call, backend, options):
        compiled.append((backend, options))
        exact = options["bits"] is None or "first" in options.get("keep", ())

        def run(*args, **kwargs):
            with nullcontext() if exact else fewbit.compress_saved_tensors(PerGroup(options["bits"]), smallest=1):
                return call(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compile_double)
    model = seeded()
    guard = fewbit.guard(model, options={"bits": 2}, every=2)
    train(model, 1)
    assert compiled == [("fewbit", {"bits": 2, "keep": ()})] and not guard.errors
    train(model, 1)
    assert guard.exact and compiled[1] == ("fewbit", {"bits": None})
    assert compiled[-1][1]["keep"] == tuple(guard.exact) and max(guard.errors.values()) < 3**-0.5
    assert train(model, 60) < 0.02


@pytest.mark.filterwarnings("ignore:fewbit. the plan stays")
def test_a_compiled_plan(monkeypatch):
    """Places of layers that err leave its bits, by compiling it anew, and a checkpoint has them left at once."""
    compiled = []

    def compile_double(call, backend, options):
        compiled.append(options)
        exact = options["bits"] is None or "first" in options.get("keep", ())

        def run(*args, **kwargs):
            with nullcontext() if exact else fewbit.compress_saved_tensors(PerGroup(2), smallest=1):
                return call(*args, **kwargs)

        return run

    def refuse(_):
        raise FewbitError("no plan fits")

    monkeypatch.setattr(torch, "compile", compile_double)
    monkeypatch.setattr(CompiledPlanner, "plan", refuse)
    plan = plan_of(2)
    plan = replace(plan, choices=(*plan.choices, replace(plan.choices[0], target="first:0")), compiled=True)
    fitted = fewbit.fit(seeded(), plan=plan, guard=2)
    guard = fitted.guard
    train(fitted.model, 1)
    assert compiled == [plan.compile_options] and not guard.errors
    train(fitted.model, 1)
    assert guard.exact and compiled[-1]["keep"] == tuple(guard.exact) and max(guard.errors.values()) < 3**-0.5
    assert not any(place.startswith("first:") for place in compiled[-1]["bits"] or ())
    assert train(fitted.model, 60) < 0.02
    other = fewbit.fit(seeded(), plan=plan, guard=2)
    other.guard.load_state_dict(guard.state_dict())
    assert compiled[-1]["keep"] == tuple(guard.exact)
    assert fitted.undo()._compiled_call_impl is None
