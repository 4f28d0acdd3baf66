"""Compressed layers under torch.compile: one graph of any batch size, eager's numbers and eager's bytes kept."""

import pytest
import torch
from fewbit import layers
from fewbit.layers import QuantizerSaver
from fewbit.quantizers import PerGroup
from layer_cases import CASES, EXACT
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

# Torch's compiler decomposes resampling by float32 coordinates, and reads a number from the count of batches.
INTERPOLATES = "bilinear"
OF_ALL_BATCHES = "momentum=None"


def layer_of(case):
    if case in CASES:
        return case.compressed(bits=4)
    return getattr(layers, case.name)(*case.arguments, **case.keywords)


def passes(call, module, x, seed=0):
    """Output, gradients and bytes kept for the backward pass, parameters and buffers aside."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = (storage.nbytes(), t)  # holds it, so that no other has its identity
        return t

    torch.manual_seed(seed)
    with saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    nbytes = sum(n for n, _ in kept.values())
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return y.detach(), [x.grad, *(p.grad for p in module.parameters())], nbytes


def same(ours, expected, exact=True):
    if ours is None or expected is None:
        return ours is expected
    return torch.equal(ours, expected) if exact else torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)


def has_batches(case):
    """Whether dimension 0 of the input may have any size."""
    dims = {"1d": 3, "2d": 4, "3d": 5}.get(case.name[-2:], 2)
    return len(case.shape) >= dims or case.name == "BatchNorm1d"


@pytest.mark.parametrize("case", [c for c in (*CASES, *EXACT) if OF_ALL_BATCHES not in str(c)], ids=str)
class TestEveryLayer:
    def test_is_eagers_in_one_graph(self, case):
        layer, twin = layer_of(case), layer_of(case)
        twin.load_state_dict(layer.state_dict())
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        exact = INTERPOLATES not in str(case)
        for seed in (0, 1):
            x = case.input(seed)
            y, grads, _ = passes(lambda x: compiled(x, **case.call), layer, x, seed)
            eager_y, eager_grads, _ = passes(lambda x: twin(x, **case.call), twin, x, seed)
            assert same(y, eager_y, exact)
            assert all(map(lambda a, b: same(a, b, exact), grads, eager_grads))
        assert all(map(torch.equal, layer.buffers(), twin.buffers()))

    def test_keeps_eagers_bytes(self, case):
        if case.name == "Upsample" or case.arguments == (1.0,):  # torch's decompositions keep coordinates, and a mask
            pytest.skip("torch's own")
        x = case.input()
        layer = layer_of(case)
        expected = passes(lambda x: layer(x, **case.call), layer, x)[2]
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert passes(lambda x: compiled(x, **case.call), layer, x)[2] == expected

    def test_takes_any_batch(self, case):
        if not has_batches(case):
            pytest.skip("no batch")
        layer, counter = layer_of(case), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for n in (17, 20, 23, 29):  # below 16 convolutions of torch run other kernels
            x = torch.randn(n, *case.shape[1:])
            passes(lambda x: compiled(x, **case.call), layer, x)
        assert counter.frame_count <= 2  # the second compilation is of any size


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "Softmax"])
def test_two_copies_are_rounded_apart(name):
    arguments = () if name == "Softmax" else (32,)
    layer = getattr(layers, name)(*arguments, bits=2, copies=2)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    y, grads, nbytes = passes(call, layer, x)
    eager_y, eager_grads, expected = passes(layer, layer, x)
    assert same(y, eager_y)
    assert all(map(same, grads, eager_grads))
    assert nbytes == expected


class Attends(nn.Module):
    """Projections and attention, saved in four bits."""

    def __init__(self, **options):
        super().__init__()
        self.project, self.options, self.saver = nn.Linear(32, 96), options, QuantizerSaver(PerGroup(4))

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return layers.scaled_dot_product_attention(q, k, v, self.saver, **self.options)


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": torch.linspace(-2, 2, 144).view(12, 12)},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_eagers_in_one_graph_of_any_batch(options):
    model, counter = Attends(**options), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (18, 20, 23):
        x = torch.randn(n, 12, 32)
        ours, expected = passes(compiled, model, x), passes(model, model, x)
        assert same(ours[0], expected[0])
        assert all(map(same, ours[1], expected[1]))
        assert ours[2] == expected[2]
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_eagers_in_one_graph(need_weights, dropout):
    model = layers.MultiheadAttention(32, 4, batch_first=True, dropout=dropout)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (18, 20, 23):
        x = torch.randn(n, 12, 32)
        ours = passes(lambda x: compiled(x, x, x, need_weights=need_weights), model, x)
        expected = passes(lambda x: model(x, x, x, need_weights=need_weights), model, x)
        assert same(ours[0], expected[0])
        assert ours[2] <= expected[2]
        # Without dropout the compiler merges the copies of the weights that softmax and product save.
        if not need_weights or dropout:
            assert all(map(same, ours[1], expected[1]))
    assert counter.frame_count <= 2
