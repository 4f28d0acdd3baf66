"""Experts with fused weights: Mixtral, Qwen2/3-MoE, GPT-OSS and others, in every way that transformers runs them."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit.memory import profile
from fewbit.runtime.layers.gated_experts import GatedExperts
from glu_cases import grads, relative, same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
HIDDEN, WIDE, EXPERTS, TOP, TOKENS = 32, 256, 4, 2, 48
ROWS = TOKENS * TOP
WAYS = ("eager", "batched_mm", "grouped_mm")
AT_4_BITS, AT_8_BITS = 6 / 15 / 6**0.5 * 2**0.5 + 0.02, 6 / 255 / 6**0.5 * 2**0.5 + 0.02  # as in test_gated_forms.py
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "moe_intermediate_size": WIDE,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
}


def experts(name, way="grouped_mm", **options):
    """Experts of a model with random weights of a size that keeps the deviations of what they put out."""
    package, cls = name
    module = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    config = getattr(transformers, options.pop("config"))(**SIZES, **options)
    config._experts_implementation = way
    torch.manual_seed(0)
    made = getattr(module, cls)(config)
    for p in made.parameters():
        nn.init.normal_(p, std=HIDDEN**-0.5 if p.dim() == 3 else 0.5)
    return made


MIXTRAL = (("mixtral", "MixtralExperts"), {"config": "MixtralConfig"})
GPT_OSS = (("gpt_oss", "GptOssExperts"), {"config": "GptOssConfig", "swiglu_limit": 1.5})
KINDS = {
    "mixtral": MIXTRAL,
    "qwen2-moe": (("qwen2_moe", "Qwen2MoeExperts"), {"config": "Qwen2MoeConfig"}),
    "qwen3-moe": (("qwen3_moe", "Qwen3MoeExperts"), {"config": "Qwen3MoeConfig"}),
    "gpt-oss": GPT_OSS,
}


def made(kind, way="grouped_mm"):
    name, options = KINDS[kind]
    return experts(name, way, **options)


def routed(seed=7):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    weights, index = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(-1).topk(TOP)
    return x, index, weights.detach().requires_grad_()


def check_gradients(module, exact, error):
    results = []
    for each in (module, exact):
        x, index, weights = routed()
        results.append(grads(each(x, index, weights), [x, weights, *each.parameters()]))
    for ours, theirs in zip(*results, strict=True):
        assert relative(ours, theirs) < error


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_names_and_routing_stay_and_gradients_are_near(kind, way):
    exact = made(kind, way)
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    inside = model["experts"]
    report = fewbit.convert(model, glu="parts")
    assert [(row.name, row.was) for row in report.replaced] == [("experts", type(exact).__name__)] and not report.left
    assert report.replaced[0].bits == 11.25 + 2 * (kind == "gpt-oss")
    assert model["experts"] is inside and isinstance(inside, GatedExperts) and isinstance(inside, type(exact))
    assert list(inside.state_dict()) == list(exact.state_dict())
    x, index, weights = routed()
    expected = exact(x, index, weights)
    assert same(inside(x, index, weights), expected)
    with torch.no_grad():
        assert same(inside(x, index, weights), exact(x, index, weights))
    check_gradients(inside, exact, AT_4_BITS)
    # The weights of the router get a gradient from the exact output of each expert.
    ours, theirs = (grads(each(*(r := routed())), [r[2]])[0] for each in (inside, exact))
    torch.testing.assert_close(ours, theirs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other["experts"](x, index, weights), expected)
        check_gradients(other["experts"], exact, AT_4_BITS)
    fewbit.convert(model, bits=8, glu={"copy_bits": 8})
    check_gradients(inside, exact, AT_8_BITS)
    fewbit.revert(model)
    assert model["experts"] is inside and type(inside) is type(exact) and vars(inside).keys() == vars(exact).keys()
    assert same(inside(x, index, weights), expected)
    check_gradients(inside, exact, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_parts_replace_gate_act_up_and_product(kind, way):
    exact = made(kind, way)
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    before = profile(model["experts"], *routed()).total
    fewbit.convert(model, glu="parts")
    after = profile(model["experts"], *routed()).total
    # Gate and up in one memory, act(gate), h; GPT-OSS: these before they are cut, and five more.
    exactly = ROWS * WIDE * 4 * (7 if kind == "gpt-oss" else 4)
    parts = ROWS * WIDE * (13.25 if kind == "gpt-oss" else 11.25) / 8
    rounded = EXPERTS * WIDE * 4  # a group and a byte of codes more for each expert, where a loop runs them
    assert before - exactly - rounded <= after - parts <= before - exactly + rounded, (before, after)


@pytest.mark.parametrize("keep", ["inputs", "exact"])
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_keep(way, keep):
    exact = made("mixtral", way)
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    fewbit.convert(model, glu=keep)
    x, index, weights = routed()
    assert same(model["experts"](x, index, weights), exact(x, index, weights))
    check_gradients(model["experts"], exact, AT_4_BITS if keep == "inputs" else 1e-5)


def test_frozen_experts_keep_nothing_of_the_product():
    model = nn.ModuleDict({"experts": made("mixtral")})
    model.requires_grad_(False)
    fewbit.convert(model, glu="parts")
    x, index, weights = routed()
    kept = profile(model["experts"], x, index, weights).total
    assert kept < ROWS * WIDE * 7.5 / 8 + 2 * ROWS * HIDDEN * 4 + 4 * ROWS * 8 * 4  # code and act(gate)
    y = model["experts"](x.detach(), index, weights.detach())
    assert not y.requires_grad


class Former(nn.Module):
    """The experts of transformers 5.0 and of code written after it, without its choice of implementations."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDE, HIDDEN) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) * HIDDEN**-0.5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final_hidden_states = torch.zeros_like(hidden_states)
        with torch.no_grad():
            expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts)
            expert_mask = expert_mask.permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[token_idx]
            gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = self.act_fn(gate) * up
            current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
            final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
        return final_hidden_states


class Cut(Former):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights).clamp(-1, 1)


def test_experts_of_your_own_are_known_by_what_they_compute():
    exact = Former()
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    fewbit.convert(model, glu="parts")
    x, index, weights = routed()
    assert same(model["experts"](x, index, weights), exact(x, index, weights))
    check_gradients(model["experts"], exact, AT_4_BITS)
    report = fewbit.convert(nn.ModuleDict({"experts": Cut()}), glu="parts")
    assert [row.why for row in report.left if row.name == "experts"] == [
        "its fused experts compute their product in none of the ways that fewbit knows"
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: setattr(e, "alpha", 1.5), "its sigmoid has the factor 1.5, and fewbit.QuickGELU 1.702"),
        (
            lambda e: setattr(e.config, "_experts_implementation", "sonicmoe"),
            "experts_implementation='sonicmoe' does not compute the product of gate and up apart",
        ),
    ],
)
def test_what_is_left_is_named(change, why):
    model = nn.ModuleDict({"experts": made("gpt-oss")})
    change(model["experts"])
    report = fewbit.convert(model, glu="parts")
    assert [(row.name, row.why) for row in report.left] == [("experts", why)] and not report.replaced
    assert "all that it could take is left" in str(report)


def test_unknown_loop_is_taken_in_another_implementation():
    name, options = ("aria", "AriaExperts"), {"config": "AriaTextConfig", "moe_num_experts": EXPERTS}
    try:
        model = nn.ModuleDict({"experts": experts(name, "eager", **options)})
    except AttributeError:
        pytest.skip("this transformers has no such experts")
    report = fewbit.convert(model, glu="parts")
    assert [row.why.partition(";")[0] for row in report.left if row.name == "experts"] == [
        "its loop over the experts is none that fewbit knows"
    ]
    model["experts"].config._experts_implementation = "grouped_mm"
    assert [row.name for row in fewbit.convert(model, glu="parts").replaced] == ["experts"]


def test_compiled_experts_train():
    exact = made("gpt-oss", "batched_mm")
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    fewbit.convert(model, glu="parts")
    x, index, weights = routed()
    y = torch.compile(model["experts"], backend="aot_eager")(x, index, weights)
    torch.testing.assert_close(y, exact(x, index, weights))
    ours = grads(y, [x, *model.parameters()])
    for a, b in zip(ours, grads(exact(x, index, weights), [x, *exact.parameters()]), strict=True):
        assert relative(a, b) < AT_4_BITS


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_experts_have_the_same_gradients(reentrant):
    model = nn.ModuleDict({"experts": made("mixtral")})
    fewbit.convert(model, glu="parts")
    results = [_gradients_of(model["experts"], model)]
    results.append(_gradients_of(lambda *a: checkpoint(model["experts"], *a, use_reentrant=reentrant), model))
    for a, b in zip(*results, strict=True):
        assert same(a, b)


def _gradients_of(run, model):
    x, index, weights = routed()
    model.zero_grad()
    torch.manual_seed(1)
    run(x, index, weights).square().sum().backward()
    return [x.grad, weights.grad, *(p.grad for p in model.parameters())]


MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64},
    "GptOss": {"num_local_experts": 4, "layer_types": ["full_attention", "sliding_attention"]},
}
IDS = torch.arange(2, 34).view(2, 16)


def language_model(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_with_the_same_outputs_and_keep_less(name):
    model = language_model(name)
    before, outputs = profile(model, IDS, labels=IDS).total, model(IDS).logits
    report = fewbit.convert(model, glu="parts")
    assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} <= {row.name for row in report.replaced}
    assert same(model(IDS).logits, outputs)
    assert profile(model, IDS, labels=IDS).total < 0.9 * before
    routers = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    assert routers and all(type(router).__module__.startswith("transformers.") for router in routers)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    report = fewbit.convert(model, glu="parts", level="L2")
    assert same(model(IDS).logits, outputs)
    fewbit.revert(model)
    assert not any(isinstance(module, GatedExperts) for module in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_peft_on_fused_weights(when):
    peft = pytest.importorskip("peft")
    if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this peft has no adapters of parameters")
    options = peft.LoraConfig(
        target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False
    )
    exact, ours = language_model("Mixtral"), language_model("Mixtral")
    if when == "before":
        fewbit.convert(ours, glu="parts")
    wrapped = []
    for model in (exact, ours):
        torch.manual_seed(1)
        wrapped.append(peft.get_peft_model(model, options))
    if when == "after":
        fewbit.convert(wrapped[1], glu="parts")
    assert list(wrapped[0].state_dict()) == list(wrapped[1].state_dict())
    outputs = [model(IDS, labels=IDS) for model in wrapped]
    assert same(outputs[0].logits, outputs[1].logits)
    names = [name for name, p in wrapped[0].named_parameters() if p.requires_grad]
    found = []
    for model, output in zip(wrapped, outputs, strict=True):
        output.loss.backward()
        found.append([dict(model.named_parameters())[name].grad for name in names])
    for theirs, mine in zip(*found, strict=True):
        assert relative(mine, theirs) < AT_4_BITS
    kept = [profile(model, IDS, labels=IDS).total for model in wrapped]
    assert kept[1] < kept[0]


def test_autocast():
    exact = made("mixtral", "eager")
    model = nn.ModuleDict({"experts": copy.deepcopy(exact)})
    fewbit.convert(model, glu="parts")
    x, index, weights = routed()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model["experts"](x, index, weights), exact(x, index, weights)
    assert same(ours, theirs)
    for a, b in zip(grads(ours, [x]), grads(theirs, [x]), strict=True):
        assert relative(a, b) < AT_4_BITS


def test_no_token_and_one_expert():
    model = nn.ModuleDict({"experts": made("mixtral", "eager")})
    fewbit.convert(model, glu="parts")
    x, index, weights = (t[:0] for t in routed())
    assert model["experts"](x, index, weights).shape == (0, HIDDEN)
    x, _, weights = routed()
    every = torch.zeros(TOKENS, 1, dtype=torch.long)
    y = model["experts"](x, every, weights[:, :1])
    gate, up = F.linear(x, model["experts"].gate_up_proj[0]).chunk(2, -1)
    torch.testing.assert_close(y, F.linear(F.silu(gate) * up, model["experts"].down_proj[0]) * weights[:, :1])


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])  # `batched_mm` multiplies by copies
def test_weights_must_not_change_before_the_backward_pass(way):
    model = nn.ModuleDict({"experts": made("mixtral", way)})
    fewbit.convert(model, glu="parts")
    y = model["experts"](*routed())
    with torch.no_grad():
        model["experts"].down_proj.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
