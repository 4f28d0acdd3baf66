"""Attention from rounded queries and keys: probabilities sum to one in the backward pass, and nothing else is saved."""

import pytest
import torch
from compiled import exactly, few_bits, gradients
from fewbit import FewbitError
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.report import CompileReport
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

HEADS, TOKENS, SIZE = 2, 32, 32
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """Queries, keys and values in one layer, as in GPT-2; or values that are the same at all places."""

    def __init__(self, attend, constant_values=False, key_heads=HEADS):
        super().__init__()
        self.attend, self.key_heads = attend, key_heads
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2 * key_heads * SIZE), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.qkv.weight[: WIDTH + key_heads * SIZE] *= 3
            self.qkv.weight[WIDTH + key_heads * SIZE :] *= not constant_values

    def forward(self, x):
        sizes = [HEADS, self.key_heads, self.key_heads]
        parts = self.qkv(x).split([n * SIZE for n in sizes], -1)
        q, k, v = (p.unflatten(-1, (n, SIZE)).transpose(1, 2) for p, n in zip(parts, sizes, strict=True))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2)).square().mean()


WAYS = {
    "full": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(TOKENS, TOKENS).tril() > 0),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "flex": flex_attention,
}


def run(model, **options):
    """The gradient with `options`, and what is saved."""
    reports = []
    torch.compiler.reset()
    x = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    _, gradient = gradients(few_bits(model, reports=reports, smallest=0, **options) if options else exactly(model), x)
    return gradient, [t for r in reports for t in r.tensors]


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_queries_and_keys_have_no_gradient_where_all_values_are_equal(way, monkeypatch):
    """Softmax's gradient is a difference of two sums that are then equal, if probabilities sum to one."""
    # Torch trains flex_attention on a GPU alone; op by op its graphs run anywhere.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model = Attention(WAYS[way], constant_values=True, key_heads=1 if way == "grouped" else HEADS)
    found, saved = run(model, bits=3, quantizer="groups", rounding="nearest")  # equal values have equal codes
    rows = WIDTH + model.key_heads * SIZE
    of_scores = model.qkv.weight.grad[:rows]
    assert of_scores.abs().max() < 1e-6 * found.abs().max()
    assert not [t for t in saved if t.role == "statistic"]
    run(model, bits=3, quantizer="groups", rounding="nearest", recompute_attention=False)
    assert model.qkv.weight.grad[:rows].abs().max() > 1e3 * of_scores.abs().max()


def test_values_have_their_own_bits():
    """Those of their module, and the line that makes them, though they are copies of parts of one tensor."""
    model = nn.Sequential(Attention(WAYS["causal"]))
    _, saved = run(model, bits=2)
    of_attention = sorted((t.role, t.bits, t.module) for t in saved if t.role in ("attention", "scores"))
    assert of_attention == [("attention", 2, "0"), ("scores", 3, "0"), ("scores", 3, "0")]
    assert all(__file__ in t.source for t in saved if t.nbytes)
    _, saved = run(model, bits=2, keep=("0",))
    assert not [t for t in saved if t.bits]


def test_with_many_bits_it_is_what_it_was():
    model = Attention(WAYS["causal"])
    exact, _ = run(model)
    errors = [
        float((run(model, bits=8, recompute_attention=again)[0] - exact).norm() / exact.norm())
        for again in (True, False)
    ]
    assert max(errors) < 0.02


def test_8_bits_read_the_saved_statistics():
    _, saved = run(Attention(WAYS["causal"]), bits=8)
    assert [t.nbytes for t in saved if t.role == "statistic"] == [4 * HEADS * TOKENS * 4]


def rotated(x):
    turned = torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1)
    angles = torch.arange(TOKENS)[:, None] * torch.linspace(1, 0.01, SIZE)
    return x * angles.cos() + turned * angles.sin()


PROJECTIONS = {
    "normalized": lambda x: F.rms_norm(x, (SIZE,), torch.ones(SIZE)),
    "with layer norms": lambda x: F.layer_norm(x, (SIZE,)),
    "rotary": rotated,
    "pooled": lambda x: (x + x.roll(1, -2)) / 2,
}
OTHERS = {"exponential": torch.exp, "gated": lambda x: x * x.sigmoid().flip(-1), "powers": lambda x: x**3}


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [*PROJECTIONS.values(), *OTHERS.values()], ids=[*PROJECTIONS, *OTHERS])
def test_queries_and_keys_that_are_no_projections_have_it_computed_again(change):
    _, saved = run(Attention(lambda q, k, v: WAYS["causal"](change(q), change(k), v)), bits="auto")
    has_sums = any(t.role == "statistic" and t.shape == (4, HEADS, TOKENS) for t in saved)
    assert has_sums == (change in PROJECTIONS.values())


def test_scores_far_apart():
    """The gradient of a softmax of one large probability is next to nothing beside the two sums that it is between."""
    model = Attention(lambda q, k, v: WAYS["causal"]((q.exp() - 1) * 0.1, (q.exp() - 1 + k) * 0.1, v))
    rows, errors = slice(0, 2 * WIDTH), []
    run(model)
    exact = model.qkv.weight.grad[rows].clone()
    for again in (None, False):
        run(model, bits="auto", recompute_attention=again)
        errors.append(float((model.qkv.weight.grad[rows] - exact).norm() / exact.norm()))
    assert errors[0] < 0.1 and errors[1] > 0.5


def test_the_report_says_what_computing_it_again_costs():
    """In units of one forward pass of attention: the layers take 6 and 3, attention 1 and 2.5 backwards."""
    x, shares = torch.randn(4, TOKENS, WIDTH), []
    for bits in (2, 8):
        reports = []
        torch.compiler.reset()
        gradients(few_bits(Attention(WAYS["causal"]), reports=reports, smallest=0, bits=bits), x)
        (report,) = reports
        shares.append(report.attention_again)
        assert ("computed again in the backward pass: 8.0% more" in str(CompileReport((report,)))) == (bits == 2)
    assert shares == [pytest.approx(1 / 12.5), 0]


def test_the_option_is_checked():
    with pytest.raises(FewbitError, match="recompute_attention is True, False or None"):
        CompileOptions(recompute_attention="yes")
