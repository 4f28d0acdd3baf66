"""Each choice of a plan, wherever it can be taken: its memory and its error are as predicted."""

import fewbit
import pytest
import torch
from plan_cases import (
    Attending,
    ByHand,
    Chained,
    Composed,
    Convs,
    Gated,
    Net,
    Spiked,
    batch,
    errs_as_predicted,
    fixed,
    gradient,
    images,
    planned_by,
)
from step_peak import measured_peak
from torch import nn
from torch.nn import functional as F


def is_part(option):
    """Whether an option computes a part of a block again, from its exact input."""
    return option.method == "recompute" and option.bits is None and option.target.count(".") > 1


CASES = {
    "tables": (Net, batch, lambda o: (o.method, o.bits) == ("table", 3), 4),
    "tables of formulas": (Composed, batch, lambda o: (o.method, o.bits) == ("table", 3), 4),
    "tables at random": (Net, batch, lambda o: (o.method, o.bits) == ("stochastic", 3), 4),
    "tables of formulas at random": (Composed, batch, lambda o: (o.method, o.bits) == ("stochastic", 3), 4),
    "blocks from 8 bits": (Net, batch, lambda o: (o.method, o.bits) == ("recompute", 8), 4),
    "blocks from 4 bits": (Attending, batch, lambda o: (o.method, o.bits) == ("recompute", 4), 2),
    "blocks that decide, from 8 bits": (Convs, images, lambda o: (o.method, o.bits) == ("recompute", 8), 3),
    "parts of blocks": (Gated, batch, is_part, 2),
    "attention of one memory": (ByHand, batch, lambda o: (o.method, o.bits) == ("recompute", None), 2),
    "chains": (Chained, images, lambda o: (o.method, o.bits) == ("chain", 4), 3),
    "chains in 8 bits": (Chained, images, lambda o: (o.method, o.bits) == ("chain", 8), 3),
    "chains from their inputs": (lambda: Chained(12), images, lambda o: o.method == "chain" and o.bits is None, 12),
    "groups that are turned": (Net, batch, lambda o: (o.method, o.bits) == ("rotated", 2), 8),
    "attention": (Attending, batch, lambda o: o.method == "attention", 1),
    "attention alone": (lambda: Attending(shares_output=False), batch, lambda o: o.method == "attention", 1),
    "gated": (Gated, batch, lambda o: o.method == "gated", 2),
    "outputs beside attention": (Attending, batch, lambda o: o.method == "output", 2),
    "outliers": (Spiked, batch, lambda o: (o.method, o.bits) == ("outliers", 4), 1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_memory_and_error_are_as_predicted(case):
    make, data, wanted, least = CASES[case]
    model, inputs = make(), data(32)
    exact = gradient(model, inputs)
    plan, count = planned_by(model, inputs, wanted)
    assert count >= least
    fitted = fewbit.fit(model, plan=plan)
    lowest = plan.peak.total * 0.95
    if case == "chains from their inputs":  # the gradient of a residual sum counts twice (chains.py)
        lowest -= 32 * 16 * 16 * 16 * 4
    assert lowest < measured_peak(model, inputs) + fixed(plan) <= plan.peak.total * 1.0001
    assert fitted.unknown == ()
    if plan.error == 0:
        assert all((gradient(model, inputs, s) - exact).norm() < 1e-5 * exact.norm() for s in range(1, 5))
    else:
        assert errs_as_predicted(plan, model, inputs, exact)
    fitted.undo()
    assert torch.equal(gradient(model, inputs), exact)


def test_what_a_module_keeps_of_its_input_is_there_in_the_optimizers_step():
    class Keeping(nn.Module):  # as DETR keeps its positions; and a parameter without elements
        def __init__(self):
            super().__init__()
            self.head, self.none = nn.Linear(1000, 1000), nn.Parameter(torch.zeros(0))

        def forward(self, x):
            self.last = torch.cat([x, x]).detach()
            return self.head(x).sum() + self.none.sum()

    model, x = Keeping(), torch.randn(200, 1000)
    plan = fewbit.plan(model, x, memory="1GB")
    without = fewbit.plan(nn.Sequential(nn.Linear(1000, 1000)), x, loss=torch.sum, memory="1GB")
    assert "optimizer" in plan.peak.moment
    assert plan.peak.workspace == without.peak.workspace + 2 * x.nbytes


def test_outputs_that_are_changed_in_place_do_not_stand_for_inputs():
    class Masked(nn.Module):  # as in XLM: tensor *= mask
        def __init__(self):
            super().__init__()
            self.start, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x, labels):
            x = self.start(x)
            for i in range(2):
                x = self.norms[i](x + self.layers[i](x))
                x *= 0.5
            return {"loss": F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())}

    _, count = planned_by(Masked(), batch(32), lambda option: option.method == "output")
    assert count == 0


def test_what_changes_its_input_in_place_is_not_computed_again_from_it():
    class Jittered(nn.Module):  # as the routers of MiniMax and PhiMoE: hidden_states *= noise
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
            return self.down(F.gelu(self.up(x)))

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
            self.layers = nn.ModuleList(Jittered() for _ in range(3))

        def forward(self, x, labels):
            x = self.start(x)
            for layer in self.layers:
                x = x + layer(1 * x)
            return {"loss": F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())}

    counts = [
        planned_by(Blocks(), batch(32), lambda o, exact=exact: o.method == "recompute" and (o.bits is None) == exact)[1]
        for exact in (True, False)
    ]
    assert counts == [0, 3]


@pytest.mark.deep
def test_a_table_at_random_has_no_bias():
    model, inputs = Net(), batch(32)
    plan, _ = planned_by(model, inputs, lambda o: (o.method, o.bits) == ("stochastic", 1 + 1))
    assert plan.error > 0
    assert plan.bias == 0


def test_outliers_are_not_offered_where_groups_are_as_good():
    _, count = planned_by(Net(), batch(32), lambda option: option.method == "outliers")
    assert count == 0


@pytest.mark.deep
def test_chains_of_several_bits_train_by_one_plan():
    model, inputs = Chained(), images(32)
    plan, _ = planned_by(model, inputs, lambda o: (o.method, o.bits) == ("chain", 4))
    fewbit.fit(model, plan=plan.with_choice("layers.0.conv", "chain", 8).with_choice("layers.1.conv", "chain"))
    assert [vars(layer)["forward"].bits.popitem()[1] for layer in model.layers] == [8, None, 4]


def test_a_plan_with_chains_is_refreshed_and_trains_by_chains_again():
    model, inputs = Chained(), images(32)
    plan, _ = planned_by(model, inputs, lambda o: (o.method, o.bits) == ("chain", 6))
    fitted = fewbit.fit(model, plan=plan).refresh(every=2)
    for _ in range(4):
        model(**inputs)["loss"].backward()
        assert fitted.unknown == ()
    assert fitted.plan is not plan
    assert any(choice.method == "chain" for choice in fitted.plan.choices)
    assert measured_peak(model, inputs) + fixed(fitted.plan) <= plan.peak.total * 1.0001
