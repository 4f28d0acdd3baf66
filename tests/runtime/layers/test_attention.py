"""Attention: the function and `MultiheadAttention` in all its ways of calling."""

import pytest
import torch
from fewbit import layers, memory
from fewbit.layers import ExactSaver, QuantizerSaver
from fewbit.quantizers import PerGroup
from fewbit.runtime.backends.reference.attention import random_state
from torch import nn
from torch.nn import functional as F

N, L, S, E, HEADS = 2, 5, 7, 12, 3
causal = nn.Transformer.generate_square_subsequent_mask(L)
padding = torch.tensor([[False] * L, [False] * 3 + [True] * 2])


def pair(saver=None, **arguments):
    """Ours and torch's, with the same weights."""
    made = []
    for kind, options in ((layers.MultiheadAttention, {"saver": saver or ExactSaver()}), (nn.MultiheadAttention, {})):
        torch.manual_seed(1)
        made.append(kind(E, HEADS, **arguments, **options))
    return made


def run(attention, inputs, **call):
    leaves = {id(x): x.clone().requires_grad_() for x in inputs}
    attention.zero_grad()
    torch.manual_seed(2)
    y, weights = attention(*(leaves[id(x)] for x in inputs), **call)
    torch.manual_seed(3)
    (y * torch.randn_like(y)).sum().backward()
    return [y, weights, *(x.grad for x in leaves.values()), *(p.grad for p in attention.parameters())]


def check(ours, torchs, inputs, **call):
    a, b = run(ours, inputs, **call), run(torchs, inputs, **call)
    assert torch.equal(a[0], b[0])
    assert (a[1] is None) == (b[1] is None)
    for x, y in zip(a[1:], b[1:], strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def x(length=L, seed=0, features=E, batch_first=False):
    torch.manual_seed(seed)
    return torch.randn(*((N, length) if batch_first else (length, N)), features)


CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "causal mask": {"attn_mask": causal},
    "causal mask, no weights": {"attn_mask": causal, "need_weights": False},
    "causal hint": {"attn_mask": causal, "need_weights": False, "is_causal": True},
    "causal hint, weights": {"attn_mask": causal, "is_causal": True},
    "padding": {"key_padding_mask": padding, "need_weights": False},
    "padding and mask": {"key_padding_mask": padding, "attn_mask": causal < 0},
    "padding, mask, hint": {
        "key_padding_mask": padding,
        "attn_mask": causal < 0,
        "is_causal": True,
        "need_weights": False,
    },
    "mask of each head": {"attn_mask": torch.randn(N * HEADS, L, L), "need_weights": False},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_is_torchs(call, dropout, batch_first):
    a = x(batch_first=batch_first)
    check(*pair(dropout=dropout, batch_first=batch_first), [a, a, a], **call)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "arguments", [{}, {"bias": False}, {"kdim": 4, "vdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
def test_attention_to_others_is_torchs(arguments, need_weights):
    keys = x(S, 1, arguments.get("kdim", E))
    for values in (keys, x(S, 2, arguments.get("vdim", E))):
        if values.shape[-1] == arguments.get("vdim", E):
            check(*pair(**arguments), [x(), keys, values], need_weights=need_weights)


def test_unbatched_inputs_are_torchs():
    a = torch.randn(L, E)
    check(*pair(), [a, a, a])


def test_in_evaluation_the_outputs_are_torchs():
    ours, torchs = (layer.eval() for layer in pair(batch_first=True))
    a = x(batch_first=True)
    check(ours, torchs, [a, a, a])
    with torch.no_grad():
        assert all(torch.equal(y, z) for y, z in zip(ours(a, a, a), torchs(a, a, a), strict=True))


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_that_is_learnt_has_its_gradient(need_weights, of_heads):
    """With weights it had none."""
    a, gradients = x(), []
    values = torch.randn(N * HEADS, L, L) if of_heads else torch.randn(L, L)
    for layer in pair():
        mask = values.clone().requires_grad_()
        layer(a, a, a, attn_mask=mask, need_weights=need_weights)[0].square().sum().backward()
        gradients.append(mask.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_mask_of_another_shape_is_refused():
    a = x()
    with pytest.raises(RuntimeError, match="attn_mask"):
        pair()[0](a, a, a, attn_mask=torch.zeros(L, L + 1))


def test_the_bytes_kept_are_those_of_the_codes():
    """Input, queries, keys, values and what was looked up: 64 · 64 numbers of a sample each, five times."""
    attention = layers.MultiheadAttention(64, 4, batch_first=True, bits=2)
    a = torch.randn(3, 64, 64, requires_grad=True)
    kept = memory.profile(attention, a, a, a, need_weights=False).total
    in_and_out, heads = 2 * a.numel() // 64, 3 * a.numel() // 64  # groups within the 64 features; four rows of a head
    assert kept == 5 * a.numel() * 2 // 8 + 4 * (in_and_out + heads)


class TestFunction:
    def inputs(self):
        torch.manual_seed(0)
        return [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"scale": 0.1}])
    def test_gradients_are_torchs_at_the_decompressed_inputs(self, options):
        qkv = self.inputs()
        torch.manual_seed(4)
        y = layers.scaled_dot_product_attention(*qkv, QuantizerSaver(PerGroup(bits=3)), **options)
        g = torch.randn_like(y)
        ours = torch.autograd.grad(y, qkv, g)
        torch.manual_seed(4)
        assert torch.equal(y, F.scaled_dot_product_attention(*qkv, **options))
        torch.manual_seed(4)
        saver = QuantizerSaver(PerGroup(bits=3))
        codes = [saver.compress_rows(x).decompress().requires_grad_() for x in qkv]
        theirs = torch.autograd.grad(F.scaled_dot_product_attention(*codes, **options), codes, g)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)

    def test_dropout_drops_the_same_weights_backward(self):
        qkv = self.inputs()
        found = []
        for attend in (
            lambda *a, **k: layers.scaled_dot_product_attention(*a, ExactSaver(), **k),
            F.scaled_dot_product_attention,
        ):
            torch.manual_seed(4)
            y = attend(*qkv, dropout_p=0.5)
            state = torch.get_rng_state()
            found.append(torch.autograd.grad(y.square().sum(), qkv))
            assert torch.equal(torch.get_rng_state(), state)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)

    def test_frozen_inputs_have_no_gradient(self):
        q, k, v = self.inputs()
        y = layers.scaled_dot_product_attention(q.detach(), k, v.detach(), ExactSaver())
        (theirs,) = torch.autograd.grad(F.scaled_dot_product_attention(q.detach(), k, v.detach()).sum(), k)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), k)[0], theirs)

    def test_errors_shrink_with_the_bits(self):
        qkv = self.inputs()
        exact = torch.autograd.grad(F.scaled_dot_product_attention(*qkv).square().sum(), qkv)
        errors = []
        for bits in (2, 4, 8):
            y = layers.scaled_dot_product_attention(*qkv, QuantizerSaver(PerGroup(bits=bits)))
            ours = torch.autograd.grad(y.square().sum(), qkv)
            errors.append(max((a - b).norm() / b.norm() for a, b in zip(ours, exact, strict=True)))
        # The step of b bits is 1/(2^b − 1): 1/3, 1/15, 1/255.
        assert errors[0] > 2 * errors[1] > 8 * errors[2]
        assert errors[2] < 0.02


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_dropout_s_mask_is_drawn_again_by_the_generator_of_its_device(monkeypatch, device):
    own = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.get_device_module(device), "get_rng_state", lambda *which: own)
    assert random_state(torch.device(device, 0)) is own
