"""Rounding draws from a stream of its own: dropout's masks are those of exact training, and one seed rules both."""

import copy
from contextlib import nullcontext
from functools import partial

import fewbit
import pytest
import torch
from fewbit.quantizers import Outlier, PerGroup
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP


class Network(nn.Module):
    """Tokens, with dropout before, between and behind all that is compressed."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=64, intermediate_size=96)
        self.first = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.5))
        self.attention = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True)
        self.gated = LlamaMLP(config)
        self.last = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))

    def forward(self, x):
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x + self.gated(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)),
            *(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(72, 64)),
        )
        self.last = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))

    def forward(self, x):
        return self.last(self.layers(x))


TOKENS = (Network, (4, 12, 64))
IMAGES = (Images, (4, 3, 8, 8))
METHODS = {
    "activations": (TOKENS, {"bits": 3}, None),
    "L1": (IMAGES, {"level": "L1"}, None),
    "L2": (TOKENS, {"level": "L2"}, None),
    "L2 of images": (IMAGES, {"level": "L2"}, None),
    "L3": (TOKENS, {"level": "L3", "bits": 2}, None),
    "L4": (TOKENS, {"level": "L4"}, None),
    "BLPA": (IMAGES, {"fuse_preact": 4}, None),
    "V-Quant": (TOKENS, {"outliers": 0.02, "bits": 3}, None),
    "V-Quant of images": (IMAGES, {"outliers": 0.02, "bits": 3}, None),
    "gated MLPs": (TOKENS, {"glu": "parts"}, None),
    "gated MLPs and L2": (TOKENS, {"glu": "parts", "level": "L2"}, None),
    "hooks": (TOKENS, {}, PerGroup(4)),
    "hooks of outliers": (IMAGES, {}, Outlier(4)),
    "L2 and hooks": (TOKENS, {"level": "L2"}, PerGroup(4)),
}


def models(name):
    """An exact model, the same converted, an input and the block in which the second runs."""
    (make, shape), options, quantizer = METHODS[name]
    torch.manual_seed(0)
    exact = make()
    converted = copy.deepcopy(exact)
    if options:
        fewbit.convert(converted, **options)
    around = nullcontext if quantizer is None else partial(fewbit.compress_saved_tensors, quantizer)
    return exact, converted, torch.randn(shape), around


def step(model, x, run, around=nullcontext):
    """Output, bias gradient of the last layer (which no code touches) and torch's state after a training step."""
    model.zero_grad()
    torch.manual_seed(7)
    with around():
        y = run(model, x.clone().requires_grad_())
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    (y * weights).sum().backward()
    return y.detach(), model.last[0].bias.grad.clone(), torch.get_rng_state()


def checkpointed(model, x, **options):
    return checkpoint(model, x, **options)


RUNS = {
    "plain": lambda model, x: model(x),
    **{
        f"reentrant={reentrant}, preserve={preserve}": partial(
            checkpointed, use_reentrant=reentrant, preserve_rng_state=preserve
        )
        for reentrant in (True, False)
        for preserve in (True, False)
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", METHODS)
def test_outputs_masks_and_torchs_state_are_those_of_exact_training(name, run):
    exact, converted, x, around = models(name)
    for _ in range(2):  # what is remembered from one step to the next changes nothing
        expected = step(exact, x, RUNS[run])
        found = step(converted, x, RUNS[run], around)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)  # sums in another order
        assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_gradient_under_checkpointing_is_that_without(reentrant):
    """The example that was wrong by the share of elements whose mask had changed."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    fewbit.convert(model, level="L2", bits=8)
    x, g = torch.randn(256, 64), torch.randn(256, 64)
    found = []
    for run in (lambda x: model(x), lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(3)
        run(x.clone().requires_grad_()).backward(g)
        found.append(model[0].weight.grad.clone())
    assert (found[1] - found[0]).norm() / found[0].norm() < 0.02  # 8 bits round to 1/255 of the range


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", METHODS)
def test_a_seed_makes_a_training_reproducible(name):
    def train():
        _, model, x, around = models(name)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.manual_seed(1)
        for _ in range(3):
            with around():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(), train())


def test_a_seed_makes_the_next_step_of_a_model_reproducible():
    """Of the same model, without a draw from torch's generator in between."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    fewbit.convert(model, level="L2")
    x = torch.randn(32, 64)

    def gradient():
        model.zero_grad()
        model(x).sum().backward()
        return model[0].weight.grad.clone()

    torch.manual_seed(5)
    first, second = gradient(), gradient()
    torch.manual_seed(5)
    assert torch.equal(gradient(), first)
    assert not torch.equal(first, second)
    torch.manual_seed(6)
    assert not torch.equal(gradient(), first)


def test_a_fork_of_torchs_state_does_not_repeat_what_was_rounded_before():
    quantizer, x = PerGroup(2), torch.randn(1000)
    torch.manual_seed(0)
    first = quantizer.compress(x)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        quantizer.compress(x)
    second = quantizer.compress(x)
    assert not torch.equal(first.packed, second.packed)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["activations", "gated MLPs"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_draw_what_compiled_exact_ones_draw(name, backend):
    exact, converted, x, _ = models(name)
    run = torch.compile(lambda model, x: model(x), backend=backend)
    expected, found = (step(model, x, run) for model in (exact, converted))
    torch.testing.assert_close(found[0], expected[0])  # compilers may merge what they compute
    assert torch.equal(found[2], expected[2])
    again = step(converted, x, run)
    assert torch.equal(again[0], found[0])


def test_copies_in_a_compiled_model_are_rounded_anew_in_each_layer_and_step():
    """Compilers merge equal calls, and must not merge these."""
    seen = []

    @torch.compile(backend="aot_eager", fullgraph=True)
    def seeds(a, b):
        return torch.ops.fewbit.draw_seeds(a, 2), torch.ops.fewbit.draw_seeds(b, 2)

    for _ in range(3):
        seen += [*seeds(torch.zeros(3), torch.zeros(3))]
    assert len({tuple(s.tolist()) for s in seen}) == 6
