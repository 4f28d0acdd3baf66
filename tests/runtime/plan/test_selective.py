"""A plan's choices for torch's own selective checkpointing and compiler."""

import copy
from functools import partial

import fewbit
import pytest
import torch
from fewbit.integrations.kept import kept
from fewbit.runtime.plan.selective import budgets_of, contexts_of
from fewbit.tables import FewbitError
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def with_contexts(model, contexts):
    found = copy.deepcopy(model)
    for name, context in contexts.items():
        block = found.get_submodule(name)
        options = {} if context is None else {"context_fn": context}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return found


def gradient(model, x):
    model.zero_grad()
    model(x).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_torch_saves_what_a_plan_saves_exactly_and_no_more(model):
    """The input of `down` is 8 KiB: torch keeps so much more than without a policy, in the one block that has one."""
    x = torch.randn(32, 32)
    methods = {"layers.0.down:0": "exact", "layers.0.act": "recompute", "layers.1.up:0": "exact"}
    contexts = contexts_of(model, (x,), methods, "exact")
    assert list(contexts) == ["layers.0"]
    selective, whole = with_contexts(model, contexts), with_contexts(model, {"layers.0": None})
    assert kept(selective, (x,)).saved - kept(whole, (x,)).saved == 32 * 64 * 4
    assert torch.equal(gradient(selective, x), gradient(model, x))


def test_what_an_operation_writes_into_is_computed_again(model):
    """Torch refuses what it cached and an activation in place has changed since; the rest is cached as before."""
    x = torch.randn(32, 32)
    for layer in model.layers:
        layer.act = nn.ReLU(inplace=True)
    methods = dict.fromkeys(("layers.0.norm:0", "layers.0.up:0", "layers.0.act:0", "layers.0.down:0"), "exact")
    contexts = contexts_of(model, (x,), {**methods, "layers.0.norm:1": "groups"}, "exact")
    selective, whole = with_contexts(model, contexts), with_contexts(model, {"layers.0": None})
    assert torch.equal(gradient(selective, x), gradient(model, x))
    assert kept(selective, (x,)).saved - kept(whole, (x,)).saved == 32 * (32 + 2) * 4  # what the norm returns


def test_a_budget_is_the_share_of_a_block(model):
    sizes = [("layers.0.down:0", 100, 25), ("layers.0.act", 100, 0), ("layers.1.up:0", 10, 10), ("head:0", 5, 1)]
    assert budgets_of(model, sizes) == {"layers.0": 0.125, "layers.1": 1.0}


def test_a_plan_gives_both_and_refuses_another_model(model):
    x = torch.randn(32, 32)
    plan = fewbit.plan(model, x, memory="1GB")  # exact: no block needs a policy
    assert plan.checkpoint_contexts(model, x) == {} and set(plan.budgets(model).values()) == {1.0}
    plan = plan.with_choice("layers.1.down:0", "groups", 4)
    assert list(plan.checkpoint_contexts(model, x)) == ["layers.1"]
    with pytest.raises(FewbitError, match="another model"):
        plan.budgets(Block())
