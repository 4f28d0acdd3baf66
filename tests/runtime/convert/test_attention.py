"""`attention=6`: modules that call torch's attention by name, in plain torch and in transformers."""

import copy

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.quantizers import PerGroup
from glu_cases import relative
from small_modules import Attends
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

IDS = torch.randint(3, 100, (2, 48), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Through(nn.Module):
    """A module around attention that does not call it itself."""

    def __init__(self):
        super().__init__()
        self.attends, self.norm = Attends(), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.attends(x))


def plain():
    torch.manual_seed(0)
    return Through(), {"x": torch.randn(2, 64, 64)}


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.1, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), {"input_ids": IDS, "labels": IDS}


def mistral():
    torch.manual_seed(0)
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    model = MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=8))
    return model, {"input_ids": IDS, "labels": IDS, "attention_mask": mask}


def t5():
    """Adds positions to scores by a mask that is trained: it stays torch's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, use_cache=False, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


MODELS = {make.__name__: make for make in (plain, gpt2, llama, mistral, t5)}


def step(model, batch):
    """Return the outputs and the gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**batch)
    out = out if isinstance(out, torch.Tensor) else out.logits
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(params=MODELS)
def case(request):
    model, batch = MODELS[request.param]()
    return model.train(), batch, request.param


@pytest.mark.parametrize("options", [{}, {"level": "L2"}], ids=["alone", "L2"])
def test_outputs_stay_and_gradients_are_close(case, options):
    model, batch, name = case
    exact, kept = step(model, batch), memory.profile(model, **batch).total
    without = copy.deepcopy(model)
    fewbit.convert(without, **options)
    report = fewbit.convert(model, **options, attention=6)
    assert sum("attention in 6 bits" in row.now for row in report.replaced) == {"plain": 1, "t5": 6}.get(name, 2)
    found = step(model, batch)
    assert torch.equal(found[0], exact[0])
    assert relative(found[1], exact[1]) < 0.2
    assert memory.profile(model, **batch).total < memory.profile(without, **batch).total or name == "t5"
    assert memory.profile(model, **batch).total < kept or name == "t5"


def test_query_key_and_value_are_saved_alone_and_keys_not_repeated():
    model = Attends()
    fewbit.convert(model, attention=6)
    x = torch.randn(2, 64, 64, requires_grad=True)
    rows = [row for row in memory.profile(model, x).saved if row.op == "CompressedAttention"]
    elements = 2 * 64 * (64 + 32 + 32)
    assert sum(row.bytes for row in rows if row.dtype == torch.uint8) == elements * 6 // 8


def test_the_next_layer_saves_the_output_in_its_bits_and_nobody_as_it_is():
    model = nn.Sequential(nn.Linear(64, 64), Attends())
    fewbit.convert(model, level="L2", attention=6)
    saved = memory.profile(model, torch.randn(2, 64, 64)).saved
    whole = [row.module for row in saved if row.dtype == torch.float32 and row.bytes >= 2 * 64 * 64 * 4]
    assert whole == ["0"]  # the batch, which the caller holds


def test_within_hooks_and_checkpoints():
    model, batch = plain()
    exact = step(model, batch)
    fewbit.convert(model, attention=8)
    with fewbit.compress_saved_tensors(PerGroup(8)):
        assert relative(step(model, batch)[1], exact[1]) < 0.02
    around = copy.deepcopy(model)
    around.attends = _Checkpointed(around.attends)
    assert relative(step(around, batch)[1], exact[1]) < 0.02


class _Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_eager_attention_is_left_as_it_is():
    model, batch = llama()
    model.set_attn_implementation("eager")
    exact = step(model, batch)
    fewbit.convert(model, fewbit.Attention(), fewbit.Activations(None))
    assert all(map(torch.equal, step(model, batch), exact))


def test_compiled_models_run_torchs():
    model, batch = plain()
    exact = step(model, batch)
    fewbit.convert(model, fewbit.Attention(), fewbit.Activations(None))
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True), batch)
    assert relative(found[1], exact[1]) < 1e-5


def test_a_model_without_attention_is_said_to_have_none():
    report = fewbit.convert(nn.Sequential(nn.Linear(4, 4), nn.GELU()), attention=6)
    assert any("attention=6: nothing to do here" in note for note in report.notes)


def test_selection_and_what_is_left():
    model = nn.ModuleList([Attends(), Attends(), Attends()])
    model[1].forward = lambda x: x
    model[2].saver = None
    report = fewbit.convert(model, attention=6, exclude="0")
    left = {row.name: row.why for row in report.left}
    assert left["0"] == "it is excluded"
    assert "replaced on the instance" in left["1"] and "attribute saver" in left["2"]
