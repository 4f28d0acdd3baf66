"""What every method of conversion keeps: names, objects, outputs, hooks, copies and pickles, and the way back."""

import copy
import io
import pickle

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.runtime.convert.actnn import LEVELS
from small_modules import Attends, Gated
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS = 32
X = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % WORDS


class Everything(nn.Module):
    """A piece for every method; a layer and an activation each have two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.chain = nn.Sequential(nn.Conv1d(4, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 1))
        self.norm, self.attention, self.gated = nn.LayerNorm(64), Attends(), Gated(64)
        self.act, self.linear = nn.GELU(), nn.Linear(64, 64)
        self.same_act, self.same_linear = self.act, self.linear
        self.drop, self.head = nn.Dropout(0.5).eval(), nn.Linear(64, WORDS)

    def forward(self, x):
        x = self.linear(self.chain(x).transpose(1, 2))
        x = x + self.gated(x + self.attention(self.norm(x)))
        return self.head(self.drop(self.same_act(self.same_linear(x))))


METHODS = {
    "activations": ((), {"bits": 3}),
    "activations' outputs": ((fewbit.Activations(keep="output"),), {}),
    **{level: ((), {"level": level}) for level in LEVELS if level != "L0"},
    "L3, rotated": ((fewbit.ActNN("L3", quantizer="rotated"),), {}),
    "outliers": ((), {"outliers": 0.02}),
    "glu": ((), {"glu": "parts"}),
    "glu, rotated": ((), {"glu": {"quantizer": "rotated", "input_bits": 3}}),
    "chains": ((), {"fuse_preact": 4}),
    "attention": ((), {"attention": 6}),
    "normalizations": ((fewbit.Normalizations(),), {}),
    "loss": ((fewbit.ChunkedLoss("head"),), {}),
    "all": (
        (fewbit.ChunkedLoss("head"), fewbit.GatedMLPs(), fewbit.BLPA(4), fewbit.Attention(6), fewbit.ActNN("L2")),
        {},
    ),
}


@pytest.fixture(params=METHODS)
def convert(request):
    methods, keywords = METHODS[request.param]
    return lambda model: fewbit.convert(model, *methods, **keywords)


def step(model):
    """Outputs, and the gradients of a step."""
    model.zero_grad()
    torch.manual_seed(1)
    y = model(X)
    F.cross_entropy(y.reshape(-1, WORDS), LABELS).backward()
    return y, [p.grad.clone() for p in model.parameters()]


def outputs(model):
    y, _ = step(model)
    return y


def names_of(model):
    """The names of all modules; a gated MLP computes its activation itself."""
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name != "gated.act_fn"]


def modes_of(model):
    return {name: model.get_submodule(name).training for name in names_of(model)}


def kept(model):
    torch.manual_seed(2)
    return memory.profile(model, X).total


def test_names_objects_modes_and_outputs_stay(convert):
    model, exact = Everything(), Everything()
    for module in (model.act, model.norm, model.linear, model.gated, model.head):
        module.eval()
    names, modes = names_of(model), modes_of(model)
    held = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    layers = [model.linear, model.norm, model.head, model.chain[1]]
    state = copy.deepcopy(model.state_dict())
    report = convert(model)
    assert report.model is model and report.replaced
    assert names_of(model) == names
    assert {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]} == held
    assert all(a is b for a, b in zip(layers, [model.linear, model.norm, model.head, model.chain[1]], strict=True))
    assert model.same_act is model.act and model.same_linear is model.linear
    assert modes_of(model) == modes
    assert list(model.state_dict()) == list(state)
    metadata = {k: v for k, v in state._metadata.items() if k in model.state_dict()._metadata or k != "gated.act_fn"}
    assert model.state_dict()._metadata == metadata
    for _ in range(2):
        assert torch.equal(outputs(model), outputs(exact))
    assert all(map(torch.equal, model.state_dict().values(), exact.state_dict().values()))
    with torch.no_grad():
        assert torch.equal(model.eval()(X), exact.eval()(X))
    assert torch.equal(model(X), exact(X))
    model.load_state_dict(state)


def test_copies_pickles_and_the_model_can_be_put_back(convert):
    model, exact = Everything(), Everything()
    modules, before = list(model.modules()), kept(exact)
    convert(model)
    text, bytes_kept = repr(model), kept(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False))
    for other in (*twins, model):
        assert repr(other) == text and kept(other) == bytes_kept
        assert torch.equal(outputs(other), outputs(copy.deepcopy(exact)))
        assert all(p.grad.isfinite().all() for p in other.parameters())
        assert fewbit.revert(other) is other
        assert repr(other) == repr(exact) and other.same_act is other.act and other.same_linear is other.linear
        assert [type(m) for m in other.modules()] == [type(m) for m in exact.modules()]
        assert not any({"forward", "saver"} & set(vars(m)) or m._forward_pre_hooks for m in other.modules())
        other.load_state_dict(exact.state_dict())
        assert all(map(torch.equal, step(other)[1], step(copy.deepcopy(exact))[1]))
        assert kept(other) == before
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert fewbit.revert(model) is model


def test_hooks_are_called_and_their_handles_remove_them(convert):
    model, calls = Everything(), []
    handles = []
    for module in (model.act, model.linear, model.norm, model.head):
        handles += [
            module.register_forward_pre_hook(lambda *_, **__: calls.append("before"), with_kwargs=True),
            module.register_forward_hook(lambda *_: calls.append("after")),
            module.register_full_backward_hook(lambda *_: calls.append("backward")),
            module.register_full_backward_pre_hook(lambda *_: calls.append("backward pre")),
        ]
    step(model)
    expected, calls[:] = calls[:], []
    convert(model)
    step(model)
    assert calls == expected and len(calls) == 20
    for handle in handles:
        handle.remove()
    step(model)
    assert len(calls) == 20
    fewbit.revert(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


@pytest.mark.sample(7)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_again(convert, reentrant):
    model, x = Everything(), X.clone().requires_grad_()
    convert(model)
    found = []
    for call, each in ((lambda m, x: m(x), copy.deepcopy(model)), (checkpointed(reentrant), model)):
        torch.manual_seed(1)
        F.cross_entropy(call(each, x).reshape(-1, WORDS), LABELS).backward()
        found.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*found)


def checkpointed(reentrant):
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)


def test_under_autocast_outputs_are_the_same_and_gradients_of_the_parameters_dtype(convert):
    model, exact = Everything(), Everything()
    convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(X), exact(X)
        assert y.dtype == expected.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
