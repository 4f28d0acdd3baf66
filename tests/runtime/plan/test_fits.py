"""`fewbit.fits`: the least of any plan, found without values."""

import pickle
from dataclasses import replace

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.plan import eager_planner
from torch import nn


class Net(nn.Module):
    """Four layers, a tied weight, a buffer, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.layers[3][0].weight = self.layers[0][0].weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def batch():
    return torch.randn(512, 64)


def test_the_least_is_that_of_the_least_plan():
    """On the meta device both see the same step; a model with values is not touched, nor run."""
    with torch.device("meta"):
        plan = fewbit.plan(Net(), batch(), time=1e6)
    model = Net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = fewbit.fits(model, batch(), memory="1GiB")
    assert found
    assert (found.least.total, found.exact) == (plan.peak.total, plan.exact_peak)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert found.least.total < found.exact


def test_a_share_is_of_the_exact_step():
    found = fewbit.fits(Net(), batch(), memory="40%")
    assert found.memory == int(0.4 * found.exact)
    assert bool(found) == (found.least.total <= found.memory)


def test_the_least_is_what_a_plan_is_refused_by():
    """Blocks in tiles of tokens would take more here than the loss in chunks alone, though less than neither."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8000, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
        ).bfloat16()
        ids = torch.zeros(1, 1024, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    batch = {"input_ids": ids, "labels": ids}
    least = fewbit.fits(model, batch, memory=1).least.total
    with pytest.raises(FewbitError, match=rf"the least is .*\({least:,} bytes\)"):
        fewbit.plan(model, batch, memory="1KiB")


@pytest.mark.parametrize("memory", [1, "1%"])
def test_a_memory_below_all_is_refused_before_anything_is_measured(memory, monkeypatch):
    """Errors and times of a step that runs take minutes, after which a plan for far too little was refused."""
    monkeypatch.setattr(eager_planner, "Measured", None)
    with pytest.raises(FewbitError, match=r"the least is .* try a smaller batch"):
        fewbit.plan(Net(), batch(), memory=memory)


class Leaky(nn.Module):
    """An MLP whose mask is saved in bits, and made whole again by tiles of tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        x = self.up(x)
        return self.down(torch.where(x > 0, x, x / 10))


@pytest.mark.parametrize(("time", "least_of"), [(None, "all"), (1.0, "one")])
def test_a_refusal_is_that_of_the_least_way(time, least_of):
    """Tiles take more than the step as it is here, and more time, for which they are refused: that says no least."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 16), Leaky(), nn.Linear(16, 512)), torch.randn(600, 8)
    how = {"loss": lambda y: y.square().mean(), "optimizer": "sgd"}
    least = fewbit.fits(model, x, memory=1, **how).least.total
    said = rf"\({least:,} bytes\)" if least_of == "all" else "within these limits on error and time"
    with pytest.raises(FewbitError, match=rf"the least is .*{said}" if time is None else said) as refusal:
        fewbit.plan(model, x, memory=1, time=time, **how)
    assert pickle.loads(pickle.dumps(refusal.value)).args == refusal.value.args  # as ranks and workers tell it


def test_labels_that_a_loss_holds_are_on_the_cpu():
    """The model goes to the meta device, and what its loss closes over stays: logits are computed in chunks all the
    same."""
    ids, labels = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(128, dtype=torch.int64)
    model = nn.Sequential(nn.Embedding(4000, 32), nn.Linear(32, 4000))

    def loss(labels):
        return lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), labels)

    here = fewbit.fits(model, ids, memory=1, loss=loss(labels))
    there = fewbit.fits(model, ids, memory=1, loss=loss(labels.to("meta")))
    assert here.least.total == pytest.approx(there.least.total, rel=0.01)
    assert "shorter sequences" in str(here)


def test_answers():
    """Between the least and the exact step there is a plan; below there is none."""
    known = fewbit.fits(Net(), {"x": batch()}, memory=1)
    least, exact = known.least.total, known.exact
    for memory, answer in ((1, "no, not"), (least - 1, "no, not"), (least, "yes, by a plan"), (exact, "yes, as it is")):
        found = replace(known, memory=memory)
        assert bool(found) == answer.startswith("yes")
        assert str(found).startswith(answer)
        assert ("workspace" in str(found)) is (memory < exact)
        assert ("\ntry a smaller batch; a compiled step" in str(found)) is not bool(found)


def test_what_the_arguments_change():
    """The optimizer's state, and shards of it."""
    model, x = Net(), batch()
    adam, sgd = (fewbit.fits(model, x, memory=1, optimizer=name).least for name in ("adamw", "sgd"))
    assert adam.optimizer > sgd.optimizer == 0
    assert fewbit.fits(model, x, memory=1, parallel="fsdp:2").least.parameters < adam.parameters


def test_logits_in_chunks_are_not_counted():
    """Tracing asks a tensor for its storage, which does not compute logits; and training by the plan keeps them so."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096))
    x, labels = torch.randn(64, 8), torch.randint(4096, (64,))

    def loss(logits):
        return nn.functional.cross_entropy(logits, labels.to(logits.device))

    exact = fewbit.fits(model, x, memory=1, loss=loss).exact
    fewbit.convert(model, fewbit.ChunkedLoss("1", chunk_size=8))
    chunked = fewbit.fits(model, x, memory=1, loss=loss).least
    logits = 4 * 64 * 4096
    assert exact - chunked.total > logits
    fitted = fewbit.fit(model, x, loss=loss, memory=chunked.total + logits // 2)
    output = model(x)
    loss(output).backward()
    assert output._value is None
    fitted.undo()


def test_ways_that_are_traced_together():
    """A loss in chunks and tiles of tokens, by one trace: the same as of a plan, which tries one after the other."""
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 16)) for _ in range(2))
        model = nn.Sequential(nn.Linear(16, 16), *layers, nn.Linear(16, 2048))
        x = torch.randn(2048, 16)

    def loss(logits):
        return nn.functional.cross_entropy(logits, torch.zeros(2048, dtype=torch.long, device=logits.device))

    logits = 4 * 2048 * 2048
    found = fewbit.fits(model, x, memory=1, loss=loss, optimizer="sgd").least
    assert found.total - found.parameters < logits
    plan = fewbit.plan(model, x, time=1e6, loss=loss, optimizer="sgd")
    assert {c.method for c in plan.choices} >= {"chunked", "tiled"}
    assert plan.peak.total == found.total


def test_wrong_arguments():
    class Decides(Net):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(FewbitError, match="the model asks for values"):
        fewbit.fits(Decides(), batch(), memory="1GiB")
    with pytest.raises(FewbitError, match="size"):
        fewbit.fits(Net(), batch(), memory="much")


class Logits(nn.Module):
    """A net whose forward pass makes a tensor on the CPU, wherever the model is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x) + torch.arange(8.0)


def test_a_loss_with_targets_of_its_own():
    """Those it holds, those it makes; on the CPU and, under --meta, on no device."""
    x, held = batch(), torch.zeros(512, dtype=torch.long)
    losses = (
        lambda y: nn.functional.cross_entropy(y, held),
        lambda y: nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)),
    )
    with torch.device("meta"):
        abstract = Logits()
    found = [fewbit.fits(model, x, memory="1GiB", loss=loss) for loss in losses for model in (Logits(), abstract)]
    assert len({one.exact for one in found}) == 1
    assert found[0]
