"""Gated MLPs that are written otherwise than Llama's: T5, ModernBERT, EVA02 and others, in place with their weights."""

import copy
import pickle
from functools import partial

import fewbit
import pytest
import torch
from fewbit.memory import profile
from fewbit.nn import GatedMLP
from glu_cases import grads, relative, same
from timm_import import why_no_timm
from torch import nn
from torch.nn import functional as F

NO_TIMM = why_no_timm()  # before transformers, which looks for torchvision too
transformers = pytest.importorskip("transformers")
HIDDEN, WIDE, TOKENS = 32, 256, 64
PARTS = TOKENS * WIDE * 11.25 / 8  # bytes
# Of gradients, relative. A copy of normal numbers in b bits has groups of 256 that span six deviations, so steps of
# 6/(2^b − 1), and rounded at random an error of a step/√6; h has the errors of two copies.
AT_4_BITS, AT_8_BITS = 6 / 15 / 6**0.5 * 2**0.5 + 0.02, 6 / 255 / 6**0.5 * 2**0.5 + 0.02


def config(name, **options):
    return getattr(transformers, f"{name}Config")(**options)


def t5(dropout=0.0, activation="gated-gelu"):
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    return T5DenseGatedActDense(
        config("T5", d_model=HIDDEN, d_ff=WIDE, feed_forward_proj=activation, dropout_rate=dropout)
    )


def longt5(dropout=0.0):
    from transformers.models.longt5.modeling_longt5 import LongT5DenseGatedActDense

    return LongT5DenseGatedActDense(
        config("LongT5", d_model=HIDDEN, d_ff=WIDE, feed_forward_proj="gated-gelu", dropout_rate=dropout)
    )


def modernbert(dropout=0.0):
    from transformers.models.modernbert.modeling_modernbert import ModernBertMLP

    return ModernBertMLP(config("ModernBert", hidden_size=HIDDEN, intermediate_size=WIDE, mlp_dropout=dropout))


def t5gemma(dropout=0.0):
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP

    made = transformers.T5GemmaConfig().encoder
    made.hidden_size, made.intermediate_size, made.dropout_rate = HIDDEN, WIDE, dropout
    return T5GemmaMLP(made)


def granite():
    from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP

    return GraniteMoeSharedMLP(config("GraniteMoeShared", hidden_size=HIDDEN, shared_intermediate_size=WIDE))


def moonshine():
    from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderMLP

    return MoonshineDecoderMLP(config("Moonshine", hidden_size=HIDDEN, intermediate_size=WIDE), "silu")


def recurrent_gemma():
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaMlp

    return RecurrentGemmaMlp(config("RecurrentGemma", hidden_size=HIDDEN, intermediate_size=2 * WIDE))


def lfm2():
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    return Lfm2MLP(config("Lfm2", hidden_size=HIDDEN, intermediate_size=WIDE, block_auto_adjust_ff_dim=False))


class ExpertOfOlderMixtral(nn.Module):
    """As `MixtralBlockSparseTop2MLP` of transformers before it fused the weights of experts."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN), nn.Linear(HIDDEN, WIDE)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        current_hidden_states = self.w2(current_hidden_states)
        return current_hidden_states


class OfDinov2(nn.Module):
    """As `Dinov2SwiGLUFFN` of transformers before it had Llama's names."""

    def __init__(self):
        super().__init__()
        self.weights_in, self.weights_out = nn.Linear(HIDDEN, 2 * WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, hidden_state):
        hidden_state = self.weights_in(hidden_state)
        x1, x2 = hidden_state.chunk(2, dim=-1)
        hidden = nn.functional.silu(x1) * x2
        return self.weights_out(hidden)


class OfDinov2sOwnCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(HIDDEN, 2 * WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x):
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        hidden = F.silu(x1) * x2
        return self.w3(hidden)


BLOCKS = (
    *(t5, longt5, modernbert, t5gemma, granite, moonshine, recurrent_gemma, lfm2, ExpertOfOlderMixtral, OfDinov2),
    OfDinov2sOwnCode,
)
WITH_DROPOUT = (t5, longt5, modernbert, t5gemma)


def of_timm(name, **options):
    if NO_TIMM:
        pytest.skip(NO_TIMM)
    from timm.layers import mlp

    return getattr(mlp, name)(HIDDEN, **options)


TIMM = {
    "SwiGLU": ("SwiGLU", {"hidden_features": WIDE}),
    "SwiGLU, normalized": ("SwiGLU", {"hidden_features": WIDE, "norm_layer": nn.LayerNorm}),
    "SwiGLUPacked": ("SwiGLUPacked", {"hidden_features": 2 * WIDE}),
    "GluMlp": ("GluMlp", {"hidden_features": 2 * WIDE}),
}


def built(make):
    """The block in training mode, a copy in a model of its own that has been converted, and the report."""
    torch.manual_seed(0)
    block = make().train()
    for p in block.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    model = nn.Sequential(copy.deepcopy(block))
    return block, model, fewbit.convert(model, glu="parts")


def tokens():
    return torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(7)).requires_grad_()


def output(module, x):
    torch.manual_seed(3)
    return module(x)


def check_gradients(model, block, error):
    x = tokens()
    ours = grads(output(model, x), [x, *model.parameters()])
    theirs = grads(output(block, x), [x, *block.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < error


CHECKED = {
    **{make.__name__: (make, 0) for make in BLOCKS},
    **{f"timm, {name}": (partial(of_timm, TIMM[name][0], **TIMM[name][1]), 0) for name in TIMM if "norm" not in name},
    # The mask of dropout is a bit for each element; that of dropout behind the last layer is left alone.
    **{f"{make.__name__}, dropout": (partial(make, 0.1), 1) for make in WITH_DROPOUT},
    "timm, dropout": (partial(of_timm, "SwiGLU", hidden_features=WIDE, drop=(0.1, 0.0)), 1),
}


@pytest.mark.parametrize(("make", "bits"), CHECKED.values(), ids=CHECKED)
def test_block(make, bits):
    """Outputs and names stay, the gradient is near, the parts are kept, copies and revert work."""
    block, model, report = built(make)
    assert isinstance(model[0], GatedMLP) and not report.left, report
    x = tokens()
    y, exact = output(model, x), output(block, x)
    assert same(y, exact)
    assert list(model[0].state_dict()) == list(block.state_dict())
    check_gradients(model, block, AT_4_BITS)
    assert profile(model, tokens()).total == TOKENS * HIDDEN * 4 + PARTS + bits * TOKENS * WIDE / 8
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(output(other, x), exact)
    with torch.no_grad():
        assert same(output(model, x), exact)
    fewbit.convert(model, bits=8, glu={"copy_bits": 8})
    check_gradients(model, block, AT_8_BITS)
    fewbit.revert(model)
    assert type(model[0]) is type(block) and same(output(model, x), exact)


def test_dropout_of_timm_behind_the_last_layer_is_left_alone():
    _, model, _ = built(lambda: of_timm("SwiGLU", hidden_features=WIDE, drop=0.1))
    report = fewbit.convert(model, glu="parts", level="L2")
    assert [row.name for row in report.replaced] == ["0", "0.drop2"]
    assert model(tokens()).requires_grad


def test_normalization_between_keeps_for_itself():
    called, options = TIMM["SwiGLU, normalized"]
    block, model, _ = built(lambda: of_timm(called, **options))
    x = tokens()
    y, exact = model(x), block(x)
    assert same(y, exact)
    for ours, expected in zip(grads(y, [x, *model.parameters()]), grads(exact, [x, *block.parameters()]), strict=True):
        assert relative(ours, expected) < 0.25
    kept = profile(model, tokens()).total
    # The normalization's statistics and its output, which the projection takes.
    assert kept == TOKENS * HIDDEN * 4 + PARTS + TOKENS * WIDE * 4 + 2 * TOKENS * 4
    report = fewbit.convert(model, glu="parts", level="L2")
    assert {row.name for row in report.replaced} == {"0", "0.norm", "0.fc2", "0.drop2"}
    assert same(model(x), exact) and profile(model, tokens()).total < 0.6 * kept


def test_dropout_before_a_frozen_projection_keeps_one_bit():
    _, model, _ = built(lambda: t5(0.1))
    model[0].wo.requires_grad_(False)
    code_and_copies = TOKENS * WIDE * 11.25 / 8
    assert profile(model, tokens()).total == TOKENS * HIDDEN * 4 + code_and_copies + TOKENS * WIDE / 8


def test_convolutional_gates_are_left():
    model = nn.Sequential(of_timm("GluMlp", hidden_features=2 * WIDE, use_conv=True))
    report = fewbit.convert(model, glu="parts")
    assert [row.why for row in report.left if row.name == "0"] == ["it gates another dimension than the last"]


@pytest.mark.parametrize("make", [*WITH_DROPOUT, moonshine, granite])
def test_adapters_train_and_keep_the_same_parts(make):
    peft = pytest.importorskip("peft")
    block, model, _ = built(make)
    options = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(nn.Sequential(block), options)
    torch.manual_seed(1)
    ours = peft.get_peft_model(model, options)
    x = tokens()
    y, exact = output(ours, x), output(theirs, x)
    assert same(y, exact) and list(ours.state_dict()) == list(theirs.state_dict())
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (ours, theirs)]
    for a, b in zip(grads(y, trained[0]), grads(exact, trained[1]), strict=True):
        assert relative(a, b) < AT_4_BITS
    assert profile(ours, tokens()).total < 0.5 * profile(theirs, tokens()).total


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [modernbert, moonshine, lambda: t5(0.1)])
def test_compiles(make):
    block, model, _ = built(make)
    x = tokens()
    y = output(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    assert y.shape == x.shape and all(g.isfinite().all() for g in grads(y, [x, *model.parameters()]))
    if isinstance(block, type(moonshine())):
        torch.testing.assert_close(y, block(x))


def test_weights_of_another_dtype_are_cast_to_as_in_t5():
    block, model, _ = built(t5)
    for each in (block, model[0]):
        each.to(torch.bfloat16).wo.float()
    x = tokens().detach().bfloat16().requires_grad_()
    y, exact = model(x), block(x)
    assert same(y, exact) and y.dtype == torch.float32
    for ours, expected in zip(grads(y, [x, *model.parameters()]), grads(exact, [x, *block.parameters()]), strict=True):
        assert relative(ours, expected) < AT_4_BITS
    assert profile(model, x).total == TOKENS * HIDDEN * 2 + PARTS


class SwiGLU(nn.Module):
    """As in the PaLM that others have written for torch."""

    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class OfEsm(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=-1)
        return self.act(x1) * x2


class Parallel(nn.Module):
    """Attention and the gated MLP, both of one projection."""

    def __init__(self, unit):
        super().__init__()
        self.fused, self.heads = nn.Linear(HIDDEN, 3 * HIDDEN + 2 * WIDE, bias=False), 2
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.ff_out = nn.Sequential(unit(), nn.Linear(WIDE, HIDDEN, bias=False))

    def forward(self, x):
        *qkv, ff = self.fused(x).split((HIDDEN, HIDDEN, HIDDEN, 2 * WIDE), dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(attended) + self.ff_out(ff)


@pytest.mark.parametrize("unit", [SwiGLU, OfEsm])
def test_units_of_parallel_blocks(unit):
    exact = nn.Sequential(Parallel(unit))
    model = copy.deepcopy(exact)
    before = profile(model, tokens()).total
    report = fewbit.convert(model, glu="parts")
    assert [(row.name, row.was, row.bits) for row in report.replaced] == [("0.ff_out.0", unit.__name__, 11.25)]
    assert same(model(tokens()), exact(tokens()))
    check_gradients(model, exact, AT_4_BITS)
    assert list(model.state_dict()) == list(exact.state_dict())
    # act(gate) goes and the parts come; q, k, v alone hold what one projection computes for all.
    assert profile(model, tokens()).total <= before - TOKENS * WIDE * 4 + PARTS
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other(tokens()), exact(tokens()))
    fewbit.convert(model, glu="parts", level="L2")
    assert same(model(tokens()), exact(tokens()))
    fewbit.revert(model)
    assert type(model[0].ff_out[0]) is unit and profile(model, tokens()).total == before


class Another(SwiGLU):
    def forward(self, x):
        x, gate = x.chunk(2, dim=1)
        return F.silu(gate) * x


def test_other_halves_are_no_unit():
    report = fewbit.convert(nn.Sequential(Another()), glu="parts")
    assert not report.replaced and "the model has no gated MLP that fewbit knows" in str(report)
