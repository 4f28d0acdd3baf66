"""MLPs in tiles of tokens as a way of plans: exact, held, and only for what takes tokens by themselves."""

import copy

import fewbit
import pytest
import torch
from fewbit import Plan
from fewbit.runtime.saved.tiles import computes_by_token, tiled_forward, width_of
from plan_cases import fixed
from step_peak import measured_peak
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class Unit(nn.Module):
    """A gated MLP, much wider than its input."""

    def __init__(self, width=16, wider=256):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, wider), nn.Linear(width, wider, bias=False)
        self.down_proj, self.act_fn = nn.Linear(wider, width), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Unit()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Long(nn.Module):
    """A model of long sequences."""

    def __init__(self):
        super().__init__()
        self.start, self.layers = nn.Linear(4, 16), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def long_batch():
    return {"x": torch.randn(2, 700, 4)}


def test_names_of_features_are_no_width():
    """DETR's backbone has a list of them where a layer has a number; plans of it ended in a TypeError."""
    module = Unit()
    module.out_features = ["stage4"]
    assert width_of(module) == width_of(Unit())


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.deep
def test_the_least_is_lower_and_holds():
    """By plans, in files, that name the modules; a rounded input errs as predicted, exact tiles err by sums alone."""
    model, batch = Long(), long_batch()
    least = fewbit.fits(copy.deepcopy(model), batch, memory=1, optimizer="sgd").least.total
    fitted = fewbit.fit(model, batch, memory=int(1.05 * least), optimizer="sgd")
    plan = fitted.plan
    tiled = [choice.target for choice in plan.choices if choice.method == "tiled"]
    assert tiled == ["layers.0.mlp", "layers.1.mlp"] and "in tiles of tokens" in str(plan)
    assert measured_peak(model, batch) + fixed(plan) <= 1.05 * least
    fitted.undo()
    exact = gradients(model, batch)
    for target in [choice.target for choice in plan.choices if choice.method in ("groups", "recompute")]:
        plan = plan.with_choice(target, "exact")
    fewbit.fit(model, plan=Plan.from_text(plan.to_text()))
    assert are_near(gradients(model, batch), exact, 1e-6)
    fewbit.revert(model)
    assert not any("forward" in vars(module) for module in model.modules())


class Attention(nn.Module):
    """A model of one attention, whose projection to query, key and value at once is wide for its input."""

    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(4, 16), nn.Linear(16, 1)
        self.qkv, self.o = nn.Linear(16, 3 * 256, bias=False), nn.Linear(256, 16)

    def forward(self, x):
        x = self.start(x)
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return {"loss": self.head(x + self.o(y)).square().mean()}


def test_adapted_projections():
    """What adapters make beside a projection is there for a tile; what attention takes is whole, bit for bit."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=8, target_modules=["qkv", "o"], init_lora_weights=False)
    model, batch = peft.get_peft_model(Attention(), options), long_batch()
    abstract = copy.deepcopy(model).to("meta"), {"x": batch["x"].to("meta")}
    least = fewbit.fits(*abstract, memory=1).least.total
    plan = fewbit.plan(*abstract, memory=int(1.05 * least))
    fitted = fewbit.fit(model, plan=plan)
    tiled = [choice.target for choice in plan.choices if choice.method == "tiled"]
    assert tiled == ["base_model.model.qkv"]
    assert measured_peak(model, batch) + fixed(plan) <= 1.05 * least
    fitted.undo()
    exact = gradients(model, batch)
    for target in [choice.target for choice in plan.choices if choice.method not in ("tiled", "exact")]:
        plan = plan.with_choice(target, "exact")
    fewbit.fit(model, plan=plan)
    found = gradients(model, batch)
    assert torch.equal(found[0], exact[0]) and are_near(found, exact, 1e-6)


class Mixing(Unit):
    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


class Attending(Unit):
    def forward(self, x):
        return super().forward(x.softmax(1))


class Later(Unit):
    def forward(self, x):
        return super().forward(torch.cat([x[:, 1:], x[:, :1]], 1))


class Positions(Unit):
    def forward(self, x):
        return super().forward(x + torch.arange(x.shape[1])[None, :, None])


class Turning(Unit):
    def forward(self, x):
        return super().forward(x.transpose(1, 2).reshape(x.shape))


class Adding(Unit):
    def forward(self, x):
        return super().forward(x).cumsum(1)


class Values(Unit):
    def forward(self, x):
        return super().forward(x if x.max() > 0 else -x)


class Dropping(Unit):
    def forward(self, x):
        return F.dropout(super().forward(x))


class Masking(Unit):
    """Drops features, of all tokens the same."""

    def forward(self, x):
        return super().forward(x * torch.empty(16).bernoulli_(0.5))


class Writing(Unit):
    def forward(self, x):
        return super().forward(F.relu_(x))


class Counting(Unit):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeping(Unit):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Listing(Unit):
    def __init__(self):
        super().__init__()
        self.norms = []

    def forward(self, x):
        self.norms.append(x.detach().norm(dim=-1))
        return super().forward(x)


class ByLength(Unit):
    def forward(self, x):
        return super().forward(x) / x.shape[1]


class Gained(Unit):
    """By a tensor of another module, whose gradient a call that autograd does not see would lose."""

    def __init__(self):
        super().__init__()
        self.gain = 2 * torch.ones((), requires_grad=True)

    def forward(self, x):
        return super().forward(x) * self.gain


class Normed(Unit):
    """The same for each token: norms, softmax and means of its features."""

    def forward(self, x):
        x = F.rms_norm(F.layer_norm(x, (16,)), (16,)) * x.softmax(-1) + x.mean(-1, keepdim=True)
        return super().forward(x.float().flatten(0, 1)).view(x.shape)


class Chunks(Unit):
    """A projection to gate and value at once."""

    def forward(self, x):
        gate, up = self.gate_proj(x).chunk(2, -1)
        return x + self.down_proj(torch.cat([F.gelu(gate) * up, up.clamp(0, 1)], -1))


@pytest.mark.parametrize("kind", [Mixing, Attending, Later, Positions, Turning, Adding, Values, Dropping])
def test_what_mixes_tokens_is_left(kind):
    assert not computes_by_token(kind(), torch.zeros(16))


@pytest.mark.parametrize("kind", [Masking, Writing, Counting, Keeping, Listing, ByLength, Gained])
def test_what_several_calls_would_do_otherwise_is_left(kind):
    """Each token has a row of its own here, and one call a step has another effect than one for each tile."""
    assert not computes_by_token(kind(), torch.zeros(16))


def are_near(found, expected, error):
    """Whether all differ by no more than sums of other order do, relative to their norms."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(other is None if one is None else (one - other).norm() <= error * other.norm() for one, other in pairs)


@pytest.mark.parametrize("kind", [Unit, Normed, Chunks])
def test_what_takes_tokens_by_themselves(kind):
    """In tiles it gives torch's own numbers, with autocast, within a block that is computed again, and frozen."""
    module, x = kind(), torch.randn(3, 300, 16)
    assert computes_by_token(module, torch.zeros(16))
    tiled = copy.deepcopy(module)
    vars(tiled)["forward"] = tiled_forward(tiled)
    results = []
    for one, through in ((module, None), (tiled, None), (tiled, checkpoint)):
        for frozen in (False, True):
            one.requires_grad_(not frozen)
            one.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", enabled=frozen):
                y = one(given * 2) if through is None else through(one, given * 2, use_reentrant=False)
            y.float().square().sum().backward()
            results.append((y.detach(), given.grad, [p.grad for p in one.parameters()]))
    for i in (2, 4):
        assert torch.equal(results[i][0], results[0][0]) and torch.equal(results[i + 1][0], results[1][0])
        assert are_near(results[i], results[0], 1e-6) and are_near(results[i + 1][1:], results[1][1:], 1e-2)


@pytest.mark.parametrize(("tokens", "dtype"), [(513, torch.float32), (10_000, torch.float64)])
def test_the_forward_pass_has_torchs_bits(tokens, dtype):
    """Products of one row alone have others, and so have rows that blocks of four leave over in float64."""
    module, x = Unit().to(dtype), torch.randn(tokens, 16, dtype=dtype)
    assert torch.equal(tiled_forward(module)(x), module(x))


def test_hooks_of_parameters_see_one_gradient():
    """That of all tokens, as without tiles: a hook that scales would do so for each tile and for their sum."""
    module, x, seen = Unit(), torch.randn(900, 16), []
    module.up_proj.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    found = []
    for forward in (module, tiled_forward(module)):
        module.zero_grad()
        forward(x).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert len(seen) == 2 and are_near(found[1], found[0], 1e-6) and are_near(seen[1], seen[0], 1e-6)


def test_parameters_that_are_replaced_are_not_lost():
    """Those that are computed of others, as FSDP1's are, get their gradient of all tokens at once; of leaves in a
    functional call, which are gone when tiles are computed again, there would be none."""
    module, x, found = Unit(), torch.randn(900, 16), []
    tiled = copy.deepcopy(module)
    vars(tiled)["forward"] = tiled_forward(tiled)
    for one in (module, tiled):
        weights = {name: 2 * p for name, p in one.named_parameters()}
        torch.func.functional_call(one, weights, (x,)).square().sum().backward()
        found.append([p.grad for p in one.parameters()])
    assert are_near(found[1], found[0], 1e-6)
    leaves = {name: p.detach().requires_grad_() for name, p in tiled.named_parameters()}
    with pytest.raises(RuntimeError, match="Unit has other parameters than in its forward pass"):
        torch.func.functional_call(tiled, leaves, (x,)).sum().backward()
