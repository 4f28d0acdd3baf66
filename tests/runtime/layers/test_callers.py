"""The caller's batch stays in memory anyway: a layer saves it as it is, and no copy of it."""

import copy
import weakref

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.runtime.layers import callers
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

WAYS = {
    "L2": {"level": "L2", "bits": 2},
    "L3": {"level": "L3", "bits": 2},
    "L4": {"level": "L4", "bits": 2},
    "V-Quant": {"outliers": 0.02, "bits": 3},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def convert(model, way):
    fewbit.convert(model, **way)
    return model


class First(nn.Module):
    """A layer of the input, in a module of its own, so that it differs from the rest."""

    def __init__(self, first, before=lambda x: x):
        super().__init__()
        self.first, self.before = first, before

    def forward(self, x, scale=1.0):
        return self.first(self.before(x)) * scale


LAYERS = {
    "Linear": (lambda: nn.Linear(64, 8), (32, 64)),
    "Linear of texts": (lambda: nn.Linear(64, 8), (4, 32, 64)),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), (8, 4, 64)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), (8, 3, 16, 16)),
    "Conv2d of one image": (lambda: nn.Conv2d(3, 4, 3), (3, 16, 16)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (8, 3, 16, 16)),
}
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(64), (32, 64)),
    "RMSNorm": (lambda: nn.RMSNorm(64), (32, 64)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (8, 4, 16, 16)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(64), (32, 64)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (8, 4, 16, 16)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (8, 4, 16, 16)),
}


def weight_gradient(model, *inputs):
    y = model(*inputs)
    return torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad])


@ways
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_the_first_layer_keeps_the_batch_and_its_gradient_is_exact(way, make, shape):
    torch.manual_seed(0)
    exact = First(make())
    model, x = convert(copy.deepcopy(exact), way), torch.randn(shape)
    assert memory.profile(model, x).by_module() == memory.profile(exact, x).by_module()
    for ours, theirs in zip(weight_gradient(model, x), weight_gradient(exact, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", ["L2", "L3", "L4"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=list(NORMS))
def test_normalizations_do_so_too(level, copies, make, shape):
    exact = First(make())
    model, x = convert(copy.deepcopy(exact), {"level": level, "bits": 2}), torch.randn(shape).requires_grad_()
    model.first.copies = copies
    assert memory.profile(model, x).total <= memory.profile(exact, x).total
    results = [torch.autograd.grad(one(x).pow(3).sum(), [x, *one.parameters()]) for one in (model, exact)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


HELD = {
    "itself": lambda model, x: model(x),
    "by keyword": lambda model, x: model(x=x, scale=2.0),
    "as a view": lambda model, x: model(x.view(4, 8, 64)),
    "as a part": lambda model, x: model(x[3:30]),
    "transposed": lambda model, x: model(x.t().contiguous().t()),
    "that asks for a gradient": lambda model, x: model(x.requires_grad_()),
    "in bfloat16": lambda model, x: model.bfloat16()(x.bfloat16()),
    "in float64": lambda model, x: model.double()(x.double()),
}


@ways
@pytest.mark.parametrize("call", HELD.values(), ids=list(HELD))
def test_however_the_batch_is_passed(way, call):
    model, held = convert(First(nn.Linear(64, 8)), way), []
    x = torch.randn(32, 64)

    def pack(t):
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(model, x)
    assert not any(t.dtype == torch.uint8 for t in held)


@ways
@pytest.mark.parametrize(
    "before",
    [
        lambda x: x.view(4, 8, 64),
        lambda x: x[:, None].flatten(0, 1),
        lambda x: x.t().t(),
        lambda x: x.float(),
        lambda x: x.detach(),
    ],
)
def test_views_that_the_model_makes_are_the_callers_memory(way, before):
    model = convert(First(nn.Linear(64, 8), before), way)
    assert memory.profile(model, torch.randn(32, 64)).by_module()["first"] == 32 * 64 * 4


@ways
@pytest.mark.parametrize("before", [lambda x: x * 2, lambda x: x.clone(), lambda x: x.double(), torch.relu])
def test_what_the_model_computes_of_the_batch_is_compressed(way, before):
    first = nn.Linear(64, 8).to(before(torch.zeros(1)).dtype)
    model = convert(First(first, before), way)
    assert memory.profile(model, torch.randn(32, 64)).by_module()["first"] < 32 * 64 * 4 / 4


@ways
def test_what_frozen_layers_compute_is_compressed(way):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    convert(model, way)
    assert memory.profile(model, torch.randn(32, 64)).by_module()["2"] < 32 * 64 * 4 / 4


@ways
def test_nested_arguments_and_the_same_batch_in_two_layers(way):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, batch):
            return self.a(batch["x"]) + self.b(batch["more"][0])

    model, x = convert(Two(), way), torch.randn(32, 64)
    kept = memory.profile(model, {"x": x, "more": [x, None]})
    assert kept.total == 32 * 64 * 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@ways
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_recompute_the_same(way, reentrant, inside):
    """A block that is run again in the backward pass runs without its model, and must know the batch all the same."""
    torch.manual_seed(0)
    exact = Checkpointed(reentrant) if inside else Checkpointed(reentrant).block
    model, x = convert(copy.deepcopy(exact), way), torch.randn(32, 64).requires_grad_()
    for one in (model, exact):
        y = one(x) if inside else checkpoint(one, x, use_reentrant=reentrant)
        y.square().mean().backward()
    first, theirs = ((one.block if inside else one)[0].weight.grad for one in (model, exact))
    torch.testing.assert_close(first, theirs)


def test_no_memory_is_kept_alive_and_none_of_another_tensor_is_mistaken_for_it():
    model = convert(First(nn.Linear(64, 8)), WAYS["L2"])
    for _ in range(100):
        x = torch.randn(32, 64)
        model(x)
        gone = weakref.ref(x)
        del x
        assert gone() is None
        assert not callers.is_callers(torch.randn(32, 64))
    assert len(callers._callers._known) < 100


def test_without_a_gradient_nothing_is_noted():
    model, x = convert(First(nn.Linear(64, 8)), WAYS["L2"]), torch.randn(32, 64)
    with torch.no_grad():
        model(x)
    assert not callers.is_callers(x)
    model(x)
    assert callers.is_callers(x) and callers.is_callers(x[1:].view(-1)) and not callers.is_callers(x + 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [WAYS["L2"], WAYS["V-Quant"]], ids=["L2", "V-Quant"])
def test_compiled_models_have_no_more_graphs(way):
    def graphs(model):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter)
        for _ in range(3):
            compiled(torch.randn(32, 64)).sum().backward()
        return counter.frame_count

    model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), way)
    with_note = graphs(model)
    callers.forget_inputs(model)
    assert graphs(model) == with_note
