"""The loss in chunks as a way of plans: taken where memory needs it, exact, and put back."""

import copy

import fewbit
import pytest
import torch
from fewbit import Plan
from fewbit.layers import ChunkedHead
from plan_cases import fixed
from step_peak import measured_peak
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

WORDS = 2048
IDS = torch.randint(3, WORDS, (2, 256), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS.where(torch.arange(256) % 3 > 0, -100)}


def gpt2():
    """Its head is the embedding, once more."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=256)).eval()


def bert():
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2)).eval()


class Bare(nn.Module):
    """A model that names no head; its loss is computed outside."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids, labels):
        return self.head(self.words(input_ids).tanh())


def outside(logits):
    return F.cross_entropy(logits.flatten(0, 1), BATCH["labels"].flatten().to(logits.device), label_smoothing=0.1)


def planned(make, loss=None, **limits):
    """A plan on the meta device, where errors and times are estimated."""
    batch = {name: x.to("meta") for name, x in BATCH.items()}
    with torch.device("meta"):
        return fewbit.plan(make(), batch, loss=loss, optimizer="sgd", **limits)


def chunked(plan):
    return [choice.target for choice in plan.choices if choice.method == "chunked"]


def gradients(model, loss=None):
    model.zero_grad()
    output = model(**BATCH)
    (output.loss if loss is None else loss(output)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "loss", "head"),
    [(gpt2, None, "lm_head"), (bert, None, "cls.predictions.decoder"), (Bare, outside, "head")],
    ids=["causal, tied", "masked", "no head named, a loss outside"],
)
def test_a_plan_takes_it_where_memory_needs_it(make, loss, head):
    """Exactly, through its file, and no longer after it is put back."""
    exact = planned(make, loss, memory="1GiB")
    assert not chunked(exact), "exact training fits: the step stays as it is, bit for bit"
    plan = planned(make, loss, memory=exact.peak.total - 2 * 4 * IDS.numel() * WORDS // 2)
    assert chunked(plan) == [head] and "loss in chunks" in str(plan)
    assert plan.exact_peak == exact.exact_peak
    model = make()
    expected = gradients(copy.deepcopy(model), loss)
    classes = [type(module) for module in model.modules()]
    text = plan.to_text()
    fitted = fewbit.fit(model, plan=Plan.from_text(text), loss=loss)
    assert type(model.get_submodule(head)) is ChunkedHead
    if plan.error == 0:
        torch.testing.assert_close(gradients(model, loss), expected)
    fitted.undo()
    assert [type(module) for module in model.modules()] == classes


def test_a_step_takes_what_its_plan_says():
    model = gpt2()
    budget = planned(gpt2, memory="1GiB").peak.total // 2
    fitted = fewbit.fit(model, BATCH, memory=budget, optimizer="sgd")
    assert chunked(fitted.plan)
    assert measured_peak(model, BATCH) + fixed(fitted.plan) <= budget


def test_another_loss_is_left():
    """There chunks save nothing, and logits that are computed when they are read are counted."""
    assert not chunked(planned(Bare, lambda logits: logits.logsumexp(-1).mean(), error=0.5))


def test_the_largest_batch_is_one_in_chunks():
    """Of whose file the saved logits are those of this batch."""
    exact = planned(Bare, outside_of_any, memory="1GiB")
    plan = planned(Bare, outside_of_any, memory=exact.peak.total, batch="max")
    assert plan.batch >= 4 and chunked(plan)
    assert plan.choices[0].exact_bytes > 4 * (plan.batch - 1) * IDS.shape[1] * WORDS


def outside_of_any(logits):
    """A loss of any number of samples."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
