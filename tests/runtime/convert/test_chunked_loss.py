"""`loss="chunked"`: heads of transformers' models and of others, in chunks, with their own forward and outputs."""

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.layers import ChunkedHead
from fewbit.runtime.layers.deferred_logits import DeferredLogits
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = 160
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
GROUPED = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}
IDS = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**GROUPED))


def bart():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    )
    model.final_logits_bias.uniform_(-1, 1)
    return model


MODELS = {
    "Llama": llama,
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2)),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "Gemma 2": lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.5)),
    "Granite": lambda: GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=4.0)),
    "BART": bart,
    "BERT": lambda: BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=2)),
}


def step(model, training=False, **more):
    """Loss, logits and gradients of a step; dropout is for training."""
    model.train(training)
    model.zero_grad()
    labels = IDS.clone()
    labels[0, 2:5] = -100
    output = model(input_ids=IDS, labels=labels, **more)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_steps_agree(a, b):
    (of_a, grads_a), (of_b, grads_b) = a, b
    torch.testing.assert_close(of_a.loss, of_b.loss)
    assert grads_a.keys() == grads_b.keys()
    for name, grad in grads_a.items():
        torch.testing.assert_close(grad, grads_b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [None, 12])
def test_models_of_transformers(name, count):
    """Loss and gradients are the model's, of causal and masked ones, capped, scaled or with a constant added."""
    model = MODELS[name]()
    more = {} if count is None or name in ("BART", "BERT") else {"num_items_in_batch": count}
    before = step(model, **more)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = fewbit.convert(model, loss="chunked")
    assert len(report.replaced) == 1
    after = step(model, **more)
    assert isinstance(after[0].logits, DeferredLogits)
    assert after[0].logits._value is None
    check_steps_agree(before, after)
    assert torch.equal(after[0].logits, before[0].logits)
    assert model.state_dict().keys() == state.keys()
    with torch.no_grad():
        assert type(model(input_ids=IDS).logits) is torch.Tensor
    head = model.get_output_embeddings()
    assert fewbit.revert(model) is model
    assert type(head) is nn.Linear
    assert "loss_chunk_size" not in vars(head)


def test_the_report_has_the_bytes():
    """With inputs it states what is no longer saved: float32 logits of all tokens but for their gradients' size."""
    model = llama().requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    batch = {"input_ids": IDS, "labels": IDS}
    report = fewbit.convert(model, loss="chunked", inputs=batch)
    (row,) = report.replaced
    logits, hidden = 4 * IDS.numel() * WORDS, 4 * IDS.numel() * 16
    assert row.saved >= logits - 2 * hidden
    assert "Linear(16, 160) → ChunkedHead(16," in str(report)
    assert not any(one.op == "ChunkedCrossEntropy" for one in report.exact)
    assert memory.profile(model, **batch).total < logits + memory.profile(fewbit.revert(model), **batch).total


class Plain(nn.Module):
    """A language model in plain torch, which returns logits; and its loss."""

    def __init__(self):
        super().__init__()
        self.words, self.act, self.head = nn.Embedding(WORDS, 8), nn.ReLU(), nn.Linear(8, WORDS)

    def forward(self, ids):
        return self.head(self.act(self.words(ids)))

    def loss(self, ids):
        return F.cross_entropy(self(ids)[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def test_a_model_in_plain_torch_by_name():
    """Beside few-bit activations and a level, which leave the head to the loss; by its own methods nothing is found."""
    model = Plain()
    before = torch.autograd.grad(model.loss(IDS), list(model.parameters()))
    report = fewbit.convert(model, loss="chunked")
    assert not report.replaced
    assert 'the model has no head that fewbit knows: name it, as ChunkedLoss(heads="lm_head")' in str(report).replace(
        "\n", " "
    )
    for config in (fewbit.ChunkedLoss("head"), fewbit.ChunkedLoss(("head",), chunk_size=5)):
        fewbit.convert(model, config)
        assert type(model.act) is nn.ReLU
        for a, b in zip(torch.autograd.grad(model.loss(IDS), list(model.parameters())), before, strict=True):
            torch.testing.assert_close(a, b)
    fewbit.convert(model, fewbit.ChunkedLoss("head"), fewbit.ActNN("L2"))
    assert type(model.head) is ChunkedHead
    assert type(model.act) is not nn.ReLU
    model.loss(IDS).backward()
    fewbit.revert(model)
    assert (type(model.head), type(model.act)) == (nn.Linear, nn.ReLU)


def test_keywords():
    """Alone it is exact; beside bits or a level these do what they do."""
    for more, act in (({}, nn.GELU), ({"bits": 3}, fewbit.GELU)):
        model = llama()
        model.act = nn.GELU()
        fewbit.convert(model, loss="chunked", **more)
        assert (type(model.lm_head), type(model.act)) == (ChunkedHead, act)


def test_heads_that_are_left():
    """Other classes than torch's Linear, and a classifier, which is no head of words."""

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = llama()
    model.lm_head = Doubled(16, WORDS, bias=False)
    report = fewbit.convert(model, loss="chunked")
    assert [row.name for row in report.left] == ["lm_head"]
    assert "Doubled may compute something else than torch's Linear" in report.left[0].why
    assert type(model.lm_head) is Doubled
    config = BertConfig(**SIZES, num_attention_heads=2)
    assert not fewbit.convert(BertForSequenceClassification(config), loss="chunked").replaced


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["adapted", "frozen", "copied"])
def test_adapters(way, when):
    """LoRA on the head stays in chunks, as a sum of two heads; so do a frozen head, and one that peft trains whole."""
    target = ["q_proj", "lm_head"] if way == "adapted" else ["q_proj"]
    config = LoraConfig(
        r=2, target_modules=target, init_lora_weights=False, modules_to_save=["lm_head"] if way == "copied" else None
    )
    model = llama()
    if when == "after":
        fewbit.convert(model, loss="chunked")
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    if when == "before":
        fewbit.convert(model, loss="chunked")
    after = step(model, training=True)
    assert isinstance(after[0].logits, DeferredLogits)
    before = step(fewbit.revert(model))
    assert type(before[0].logits) is torch.Tensor
    check_steps_agree(before, after)


def test_hooks_and_checkpoints_beside_it():
    """Gradients that wait in the graph are not rounded by hooks."""
    model = llama()
    fewbit.convert(model, loss="chunked")
    right = step(model)
    with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(8)):
        rounded = step(model)
    assert torch.equal(right[0].loss, rounded[0].loss)
    assert torch.equal(right[1]["lm_head.weight"], rounded[1]["lm_head.weight"])
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=IDS, labels=IDS).loss.backward()
