"""Gated MLPs of transformers, in place with their weights; what is selected, left, and put back."""

import copy

import fewbit
import pytest
import torch
from fewbit.nn import GatedMLP
from glu_cases import same
from small_modules import Gated
from torch import nn

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MODELS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3")


def model_of(name="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


IDS = torch.arange(2, 34).view(2, 16)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_state_stay(name):
    model = model_of(name)
    before, state, modules = model(IDS).logits, copy.deepcopy(model.state_dict()), model.model.layers[0].mlp
    hook = modules.register_forward_hook(lambda *_: None)
    report = fewbit.convert(model, glu="parts")
    assert same(model(IDS).logits, before)
    assert list(model.state_dict()) == list(state) and all(map(same, model.state_dict().values(), state.values()))
    assert [row.name for row in report.replaced] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert report.replaced[0].bits == 11.25 and not report.left
    block = model.model.layers[0].mlp
    assert isinstance(block, GatedMLP) and hook.id in block._forward_hooks
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    fewbit.revert(model)
    assert model.model.layers[0].mlp is modules and same(model(IDS).logits, before)


def test_keeps_less_by_what_the_plan_says():
    model = model_of()
    before = fewbit.memory.profile(model, IDS)
    fewbit.convert(model, glu={"keep": "parts", "copy_bits": (4, 4)})
    after = fewbit.memory.profile(model, IDS)
    n = IDS.numel() * 96
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        inside = sum(size for name, size in before.by_module().items() if name.startswith(layer))
        assert inside >= 4 * n * 4
        kept = sum(size for name, size in after.by_module().items() if name.startswith(layer))
        assert kept == n // 8 * 11 + 8 * (n // 256) + IDS.numel() * 32 * 4


def test_included_excluded_and_reconverted():
    model = model_of()
    report = fewbit.convert(model, glu="inputs", include="model.layers.1.mlp")
    assert [row.name for row in report.replaced] == ["model.layers.1.mlp"]
    assert [row.why for row in report.left if row.name == "model.layers.0.mlp"] == ["it is not included"]
    report = fewbit.convert(model, 2, glu="parts", exclude="model.layers.0")
    assert model.model.layers[1].mlp.plan.code_bits == 2
    assert fewbit.convert(model, glu="parts").replaced[1].name == "model.layers.1.mlp"
    fewbit.revert(model)
    assert type(model.model.layers[1].mlp).__name__ == "LlamaMLP"


def test_without_the_argument_the_activation_alone():
    model = model_of()
    report = fewbit.convert(model)
    assert [row.name for row in report.replaced] == ["model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"]
    fewbit.convert(model, glu="parts")
    assert model.model.layers[0].mlp.plan.function == "silu"
    fewbit.revert(model)
    assert type(model.model.layers[0].mlp.act_fn).__name__ == "SiLUActivation"


def test_blocks_are_known_by_what_they_compute():
    """One of the user's, with the names and operations of Llama's; others are left (test_options.py)."""
    mine, x = Gated(8, 16, act=nn.GELU), torch.randn(4, 8, requires_grad=True)
    before = mine(x)
    report = fewbit.convert(mine, glu="parts")
    assert isinstance(report.model, GatedMLP) and same(report.model(x), before)
    assert fewbit.revert(report.model) is mine
